"""`StepRecords`: what the steps of a run recorded, and the `Profile` that is assembled from it.

A step runs more than once: profiled for its kernel times, traced for its storages and source lines. `align` finds the
ops of one run in the other, by name and shapes; where the sequences differ, the nearest place where they agree again
counts. `attach_triton_launches` gives kernels that the code launches past torch's dispatcher to the traced op of their
launch. `attribute_idle` names the causes of the idle time of the recorded step.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.roofline import Ceilings
from nearpeak.findings.engine import add_findings
from nearpeak.findings.step import StepFact
from nearpeak.machines.machine import Machine
from nearpeak.measure.statistics import median
from nearpeak.ops.cost import costs_of
from nearpeak.ops.op import Op, Trace, name_without_origin
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.idle import IdleTime
from nearpeak.profiles.idle_attribution import DeviceActivity, HostActivity, attribute
from nearpeak.profiles.memory import peak_memory
from nearpeak.profiles.profile import (
    CompilerFacts,
    DeviceKernel,
    Profile,
    add_idle,
    add_step_spread,
    build_profile,
    profile_ceilings,
)
from nearpeak.profiles.rates import step_rates
from nearpeak.profiling.steps import StepKind
from nearpeak.trace.kineto.host import HostSpan, line_of_mark
from nearpeak.trace.kineto.read import KinetoTrace
from nearpeak.trace.recorder import without_tf32

SEARCH_WINDOW = 64
"""How far ahead to look for a place of agreement."""
MIN_AGREEMENT = 2
"""How many ops in a row must agree there, so that one common op does not mislead; fewer at the end."""


def align(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[int | None]:
    """For each of `one` the index of the same op in `other`, None where there is none; indices only grow.

    >>> align(["mm", "add", "mul", "sum"], ["mm", "cast", "mul", "sum"])
    [0, None, 2, 3]
    """
    found: list[int | None] = [None] * len(one)
    left = right = 0
    while left < len(one) and right < len(other):
        if one[left] == other[right]:
            found[left] = right
            left, right = left + 1, right + 1
            continue
        step = _next_agreement(one, other, left, right)
        if step is None:  # too far apart: this op has no counterpart
            left += 1
        else:
            left, right = left + step[0], right + step[1]
    return found


def align_by(one: Sequence[Hashable], other: Sequence[Hashable], light: Collection[Hashable]) -> list[int | None]:
    """As `align`, but ops that are not `light` are aligned first, and those that are only between them.

    One run may have many views that the other does not have, so that no two ops in a row agree.

    >>> align_by(["t", "mm", "t", "sum"], ["t", "detach", "mm", "detach", "sum"], {"t", "detach"})
    [0, 2, None, 4]
    """
    here = [index for index, op in enumerate(one) if op not in light]
    there = [index for index, op in enumerate(other) if op not in light]
    found: list[int | None] = [None] * len(one)
    for index, to in zip(here, align([one[at] for at in here], [other[at] for at in there]), strict=True):
        found[index] = None if to is None else there[to]
    for (left, right), (left_end, right_end) in _gaps(found, len(one), len(other)):
        here = [index for index in range(left + 1, left_end) if one[index] in light]
        there = [index for index in range(right + 1, right_end) if other[index] in light]
        for index, to in zip(here, align([one[at] for at in here], [other[at] for at in there]), strict=True):
            found[index] = None if to is None else there[to]
    return found


def align_between(found: Sequence[int | None], one: Sequence[Hashable], other: Sequence[Hashable]) -> list[int | None]:
    """What was found, and between it what agrees by these keys, which tell less apart.

    >>> align_between([0, None, None, 3], ["mm", "add", "mul", "sum"], ["mm", "add", "exp", "sum"])
    [0, 1, None, 3]
    """
    filled = list(found)
    for (left, right), (left_end, right_end) in _gaps(found, len(one), len(other)):
        if left_end - left > 1 and right_end - right > 1:
            for at, to in enumerate(align(one[left + 1 : left_end], other[right + 1 : right_end]), left + 1):
                filled[at] = None if to is None else right + 1 + to
    return filled


def _gaps(found: Sequence[int | None], one: int, other: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """What lies between pairs that were found: the pair before and the pair after, the ends of both runs included."""
    return pairwise([(-1, -1), *((at, to) for at, to in enumerate(found) if to is not None), (one, other)])


def _next_agreement(
    one: Sequence[Hashable], other: Sequence[Hashable], left: int, right: int
) -> tuple[int, int] | None:
    """The least that both must go forward to agree again."""
    for distance in range(1, 2 * SEARCH_WINDOW):
        for forward in range(max(0, distance - SEARCH_WINDOW), min(distance, SEARCH_WINDOW) + 1):
            if _agree(one, other, left + forward, right + distance - forward):
                return forward, distance - forward
    return None


def _agree(one: Sequence[Hashable], other: Sequence[Hashable], left: int, right: int) -> bool:
    length = min(MIN_AGREEMENT, len(one) - left, len(other) - right)
    return length > 0 and all(one[left + at] == other[right + at] for at in range(length))


def attach_triton_launches(kernels: Sequence[DeviceKernel], ops: Sequence[Op]) -> list[DeviceKernel]:
    """The same kernels; those without an op are at the launches of that name, in order, where there are as many."""
    launches: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if op.origin == "triton":
            launches.setdefault(name_without_origin(op.name), []).append(index)
    alone: dict[str, list[int]] = {}
    for index in sorted(range(len(kernels)), key=lambda index: kernels[index].start_s):
        if kernels[index].op is None and kernels[index].name in launches:
            alone.setdefault(kernels[index].name, []).append(index)
    found = list(kernels)
    for name, indices in alone.items():
        if len(indices) == len(launches[name]):
            for index, at in zip(indices, launches[name], strict=True):
                found[index] = replace(found[index], op=at)
    return found


_OP_LABELS: Mapping[str, str] = {
    "aten._local_scalar_dense": "item",
    "aten.item": "item",
    "aten.is_nonzero": "item",
    "aten._to_copy": "copy",
    "aten.copy_": "copy",
    "aten._copy_from": "copy",
}
"""What an op is called in the code that has it."""


def attribute_idle(
    recorded: KinetoTrace,
    *,
    idle_s: float,
    clean: bool,
    host_ahead: bool = False,
    traced: Sequence[Op] | None = None,
    to_traced: Sequence[int | None] | None = None,
) -> IdleTime:
    """The causes of `idle_s`, from the gaps of the recorded step.

    Args:
        recorded: The step under the profiler.
        idle_s: The idle time to explain.
        clean: Whether that is the idle time of a step without the profiler.
        host_ahead: Whether clean steps began while the device was at work on the one before. The recorded one did not:
            the device had been waited for, and what passed until its first kernel is no idle time of theirs.
        traced: The ops of another run of the step, which know their lines.
        to_traced: Of each op of the recording its index there.
    """
    ops = recorded.trace.ops

    def index(op: int | None) -> int | None:
        return op if op is None or to_traced is None else to_traced[op]

    def where(op: int | None) -> str:
        there = index(op)
        place = None if there is None else (ops if traced is None else traced)[there]
        return "" if place is None else place.place

    # What torch does inside of `torch.tensor` and the like is in no trace: the next op that is has nearly its line.
    known = [where(op) for op in range(len(ops))]
    for op in range(len(ops) - 2, -1, -1):
        known[op] = known[op] or known[op + 1]
    if recorded.kernels:
        ran = [
            DeviceActivity(
                item.start_s,
                item.start_s + item.seconds,
                item.launched_s,
                "" if item.op is None else known[item.op],
                index(item.op),
            )
            for item in recorded.kernels
        ]
    else:  # ops are the kernels of a CPU
        ran = [
            DeviceActivity(start, start + took, None, known[op], index(op))
            for op, (start, took) in enumerate(recorded.spans)
        ]
    first = min((item.start_s for item in ran), default=0.0)
    last = max((item.end_s for item in ran), default=0.0)
    begins = max(first, 0.0)
    return attribute(
        ran,
        [
            HostActivity(
                span.kind,
                span.start_s,
                span.start_s + span.seconds,
                line_of_mark(span.name) or where(span.op),
                _describe_span(span, ops),
            )
            for span in recorded.host
        ],
        recorded.host_working if recorded.kernels else None,
        window=(begins if host_ahead else min(recorded.free_from_s, begins), max(last, recorded.wall_s)),
        idle_s=idle_s,
        clean=clean,
    )


def _describe_span(span: HostSpan, ops: Sequence[Op]) -> str:
    if span.kind == "input":
        return "DataLoader with workers" if "_MultiProcessing" in span.name else "DataLoader"
    if span.kind == "garbage collection":
        return ""
    if span.kind == "synchronization" and span.op is not None:
        op = ops[span.op]
        if op.origin in ("partial", "unknown"):  # one that the file does not tell enough of
            return name_without_origin(op.name).removeprefix("aten::").removeprefix("aten.")
        return _OP_LABELS.get(op.packet, op.packet.removeprefix("aten."))
    return span.name.partition(" (dynamo_timed)")[0]


LIVE_FACTS: frozenset[StepFact] = frozenset({"storages", "lines", "host", "memory"})
"""What a run tells of its steps."""
COMMUNICATION_LIBRARIES = ("nccl", "rccl", "oneccl")
"""Parts of the names of communication kernels, in lower case."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv", "reduce")
"""The more specific before the more general: a reduce-scatter is a kind of reduce by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords:
    """Clean steps by their wall times, one step of those under torch's profiler, and the same step traced."""

    source: str
    walls: Sequence[float]
    recorded: KinetoTrace
    profiled_wall: float
    traced: Trace
    wall_s: float | None = None
    """Of a clean step, where their median is not the best figure for it."""
    notes: tuple[str, ...] = ()
    host_ahead: bool = False
    """Whether clean steps began while the device was still at work on the one before."""
    compiler: CompilerFacts | None = None
    """What torch.compile did so far; None where it was not used."""
    rank: int | None = None
    """Of the process in its torch.distributed group; None if there is no group."""
    world_size: int | None = None

    def profile(self, machine: Machine, *, ceilings: Ceilings = "achievable") -> Profile:
        """The times of the profiled step at the ops of the traced one."""
        to_traced, matched = self._aligned()
        wall = self.wall_s or median(list(self.walls))
        traced = self.traced
        if machine.kind == "cpu":
            traced = dataclasses.replace(traced, ops=without_tf32(traced.ops))
        traced = dataclasses.replace(
            traced, shapes_before=_shapes_before(self.recorded.trace.ops, traced.ops, to_traced)
        )
        kernels = attach_triton_launches(device_kernels(self.recorded, to_traced), traced.ops)
        if not kernels:
            kernels = _cpu_kernels(self.recorded, to_traced, min(1.0, wall / self.profiled_wall))
        estimate = estimate_trace(traced, machine, ceilings=ceilings)
        found = build_profile(
            estimate,
            kernels,
            wall_s=wall,
            source=self.source,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=self.recorded.device,
            ceilings=profile_ceilings(machine, ceilings),
        )
        found = add_step_spread(found, kernels, self.recorded.repeats)
        idle = attribute_idle(
            self.recorded,
            idle_s=found.waterfall.seconds("idle"),
            clean=True,
            host_ahead=self.host_ahead,
            traced=traced.ops,
            to_traced=to_traced,
        )
        found = dataclasses.replace(
            add_idle(found, idle),
            steps=len(self.walls),
            walls=tuple(self.walls),
            spread=(max(self.walls) - min(self.walls)) / wall,
            matched=matched,
            profiled_s=self.profiled_wall,
            notes=(*found.notes, *self.notes),
            rates=step_rates(traced, estimate, machine, wall_s=found.wall_s, kernel_s=found.kernel_s),
            memory=None if traced.lives is None else peak_memory(traced.lives, traced.ops),
            compiler=self.compiler,
            rank=self.rank,
            world_size=self.world_size,
        )
        return add_findings(found, traced, machine, LIVE_FACTS)

    def _aligned(self) -> tuple[list[int | None], float | None]:
        """Of each op of the profiled step its index in the traced one, and the share of those that have one.

        Where there is a device, only ops that launched something count: views and what the host does are in neither,
        and a trace sees no launches of CUDA graphs.
        """
        on_device = bool(self.recorded.kernels)
        launched = {kernel.op for kernel in self.recorded.kernels if not kernel.in_graph}
        wanted = [index for index in range(len(self.recorded.trace.ops)) if not on_device or index in launched]
        views = [cost.family == "view" for cost in costs_of(self.traced.ops)]
        there = [index for index, view in enumerate(views) if not on_device or not view]
        ops, keys = self.recorded.trace.ops, [_op_key(op) for op in self.traced.ops]
        light = {key for key, view in zip(keys, views, strict=True) if view}
        here = [_op_key(ops[index]) for index in wanted]
        found = align_by(here, [keys[index] for index in there], light)
        if None in found:  # a text may have grown between the two, a batch been padded to another length
            loose = align_between(
                found, [_loose_key(key) for key in here], [_loose_key(keys[index]) for index in there]
            )
            found = [
                now if was is None and now is not None and _has_similar_sizes(here[at], keys[there[now]]) else was
                for at, (was, now) in enumerate(zip(found, loose, strict=True))
            ]
        to_traced: list[int | None] = [None] * len(ops)
        for index, at in zip(wanted, found, strict=True):
            to_traced[index] = None if at is None else there[at]
        return to_traced, sum(at is not None for at in found) / len(found) if found else None


def device_kernels(recorded: KinetoTrace, to_traced: Sequence[int | None] | None = None) -> list[DeviceKernel]:
    """What ran on the device, at the ops of another trace where that is given."""
    return [
        DeviceKernel(
            name=kernel.name,
            start_s=kernel.start_s,
            seconds=kernel.seconds,
            op=kernel.op if to_traced is None or kernel.op is None else to_traced[kernel.op],
            stream=kernel.stream,
            collective=collective_of(kernel.name),
        )
        for kernel in recorded.kernels
    ]


def collective_of(kernel: str) -> str | None:
    """The collective that a communication kernel runs, by its name; None for every other kernel.

    >>> collective_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), collective_of("ampere_bf16_gemm")
    ('all_reduce', None)
    """
    if not any(library in kernel.lower() for library in COMMUNICATION_LIBRARIES):
        return None
    name = kernel.lower().replace("_", "")
    return next((collective for collective in _COLLECTIVES if collective.replace("_", "") in name), "unknown")


def _cpu_kernels(recorded: KinetoTrace, to_traced: Sequence[int | None], share: float) -> list[DeviceKernel]:
    """Ops are the kernels of a CPU. The profiler makes them longer, as it does the step: `share` undoes that."""
    return [
        DeviceKernel(name=op.name, start_s=start * share, seconds=took * share, op=at)
        for op, (start, took), at in zip(recorded.trace.ops, recorded.spans, to_traced, strict=True)
        if took > 0.0
    ]


_TRACED_NAMES = {"aten._index_put_impl": "aten.index_put"}
"""What autograd calls, and what it calls instead under a trace."""


def _shapes_before(
    earlier: Sequence[Op], ops: Sequence[Op], to_ops: Sequence[int | None]
) -> dict[int, dict[str, tuple[int, ...]]]:
    """The shapes that arguments had when an op ran the time before, where these were others; by the index of the op."""
    found = {}
    for op, to in zip(earlier, to_ops, strict=True):
        if to is not None and _op_key(op) != _op_key(ops[to]):
            now = ops[to].arguments
            found[to] = {
                name: value.shape
                for name, value in op.arguments.items()
                if isinstance(value, Tensor) and isinstance(now.get(name), Tensor) and now[name].shape != value.shape
            }
    return found


def _loose_key(key: Hashable) -> Hashable:
    """The name of an op, and how many dimensions its tensors have."""
    return (key[0], tuple(len(shape) for shape in key[1])) if isinstance(key, tuple) else key


def _has_similar_sizes(one: Hashable, other: Hashable) -> bool:
    """Whether two ops of one name have sizes as those of steps that are alike."""
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return one == other
    pairs = zip(one[1], other[1], strict=True)
    return all(StepKind(shape=shape).alike(StepKind(shape=another)) for shape, another in pairs)


def _op_key(op: Op) -> Hashable:
    """What the same op has in common in both runs.

    Under a trace autograd adds gradients up out of place. The profiler leaves out members of long lists, and a compiled
    kernel is known by its name.
    """
    if op.origin in ("inductor", "triton"):
        return name_without_origin(op.name)
    partial = op.origin in ("partial", "unknown")
    name = name_without_origin(op.name).replace("::", ".") if partial else op.packet
    name = name.rstrip("_")
    shapes = [value.shape for key, value in op.arguments.items() if isinstance(value, Tensor) and key != "out"]
    return _TRACED_NAMES.get(name, name), tuple(shapes)
