"""A setting for debugging slows every step down: anomaly mode of autograd, blocking launches, filled memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.settings import SLOW_SETTINGS
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import seconds

_LEAST_OF_LAUNCH = 0.15
"""The share of the host's time for a launch that remains at least."""


@rule("debugging-left-on", first=True)
def debugging_left_on(step: Step) -> Iterator[Waste]:
    """What settings of the process add to the step, one waste for each that was on and whose cost can be told."""
    for name in step.trace.settings:
        look = _COSTS.get(name)
        cost = None if look is None else look(step)
        if cost is None:
            continue
        setting = SLOW_SETTINGS[name]
        yield Waste(
            title=f"{setting.words}.",
            op=None,
            source=step.line_that_writes(*setting.written_as),
            gains=cost.gains,
            gone=cost.gone,
            idle=cost.idle,
            causes=cost.causes,
            launch_s=cost.launch_s,
            evidence=cost.evidence,
            reasoning=cost.reasoning,
            remedy=setting.off,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What a setting adds to a step."""

    gains: Mapping[int, float] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    idle: Mapping[str, float] = field(default_factory=dict)
    causes: tuple[IdleCause, ...] = ()
    launch_s: Mapping[int, float] = field(default_factory=dict)
    evidence: str
    reasoning: str


def _anomaly_mode(step: Step) -> _Cost | None:
    """The checks of gradients, the waits for them, and the stacks of the ops of a forward pass."""
    checks = step.anomaly_checks
    stack_s = _stack_seconds(step)
    stacks_s = {index: count * stack_s for index, count in step.trace.graph_nodes.items()}
    if not checks and not stacks_s:
        return None
    gains = {index: step.time(index) for index in checks}
    waits = tuple(
        cause for cause in step.profile.idle if cause.cause == "synchronization" and cause.where in step.anomaly_places
    )
    idle = {"synchronization": sum(cause.seconds for cause in waits)} if waits else {}
    launch_s: Mapping[int, float] = {}
    if step.machine.kind == "cpu":  # where the time of an op is the host's
        gains |= {index: min(took, step.time(index)) for index, took in stacks_s.items()}
    else:
        late_s = sum(step.measured[index].launch_wait_s for index, op in enumerate(step.ops) if op.phase == "forward")
        idle["launching"] = min(sum(stacks_s.values()), late_s)
        launch_s = _launches_without(step, stacks_s)
    reads = len(checks) // 3
    return _Cost(
        gains=gains,
        gone=checks,
        idle=idle,
        causes=waits,
        launch_s=launch_s,
        evidence=f"{reads:,} gradients were checked in {seconds(step.seconds(checks))}, and the host waited for each "
        f"answer. It stored {sum(step.trace.graph_nodes.values()):,} stacks, {seconds(stack_s)} each.",
        reasoning="Without it, the checks, their waits and the stacks go; other findings are predicted without them.",
    )


def _stack_seconds(step: Step) -> float:
    """The time of a stack. On a CPU, a view of which one is stored does nothing else."""
    views = [
        step.time(index) / count
        for index, count in step.trace.graph_nodes.items()
        if step.costs[index].family == "view" and step.time(index)
    ]
    return max(step.trace.stack_s, median(views) if views and step.machine.kind == "cpu" else 0.0)


def _launches_without(step: Step, stacks_s: Mapping[int, float]) -> dict[int, float]:
    """What remains of the host's time for launches, for a replay. A view launches nothing: its stack delays the launch
    after it."""
    if step.replay is None:
        return {}
    host_s = step.replay.launch_seconds()
    launches: dict[int, float] = {}
    pending_s = 0.0
    for index in range(len(step.ops)):
        pending_s += stacks_s.get(index, 0.0)
        now_s = host_s.get(index)
        if now_s and pending_s:
            launches[index] = max(_LEAST_OF_LAUNCH * now_s, now_s - pending_s)
            pending_s = 0.0
    return launches


def _launch_blocking(step: Step) -> _Cost | None:
    """The host and the device, which take turns, at once: the shorter of the two goes."""
    late = tuple(cause for cause in step.profile.idle if cause.cause in ("launching", "python", "host ops"))
    idle_s = sum(cause.seconds for cause in late)
    hidden_s = min(idle_s, step.profile.kernel_s)
    if step.machine.kind != "gpu" or not hidden_s:
        return None
    idle: dict[str, float] = {}
    for cause in late:
        idle[cause.cause] = idle.get(cause.cause, 0.0) + cause.seconds * hidden_s / idle_s
    return _Cost(
        idle=idle,
        causes=late,
        evidence=f"Kernels ran for {seconds(step.profile.kernel_s)}; while the host prepared the next ones, for "
        f"{seconds(idle_s)}, nothing ran.",
        reasoning="Without it, the host prepares kernels while others run: the step takes as long as the slower of the "
        "two.",
    )


def _no_memory_cache(step: Step) -> _Cost | None:
    """The waits for allocations."""
    waits = tuple(step.idle_causes("allocator"))
    if not waits:
        return None
    waited_s = sum(cause.seconds for cause in waits)
    return _Cost(
        idle={"allocator": waited_s},
        causes=waits,
        evidence=f"The driver allocated and freed memory {sum(cause.count for cause in waits):,} times; for "
        f"{seconds(waited_s)} nothing ran because of it.",
        reasoning="Memory that torch keeps is used again without the driver.",
    )


_ALLOCATIONS = ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided")


def _filled_memory(step: Step) -> _Cost | None:
    """The kernels of ops that allocate memory, and otherwise have none."""
    gains = {index: step.time(index) for index, op in enumerate(step.ops) if op.packet in _ALLOCATIONS}
    gains = {index: took for index, took in gains.items() if took and step.bytes([index]) == 0.0}
    if not gains or step.machine.kind != "gpu":
        return None
    return _Cost(
        gains=gains,
        evidence=f"{len(gains):,} allocations filled memory, in {seconds(sum(gains.values()))}.",
        reasoning="Without it, an allocation runs no kernel. Memory that is filled inside of other ops comes on top.",
    )


_COSTS: Mapping[str, Callable[[Step], _Cost | None]] = {
    "anomaly mode": _anomaly_mode,
    "CUDA_LAUNCH_BLOCKING": _launch_blocking,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _no_memory_cache,
    "filled memory": _filled_memory,
}
