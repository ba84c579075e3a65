"""The device waits for the host, which launches ops more slowly than they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.diagnose.compiler import GraphBreak
from nearpeak.diagnose.examined import Examined
from nearpeak.diagnose.finding import Waste
from nearpeak.diagnose.findings import rule
from nearpeak.diagnose.idle import BETWEEN_OPS, LATE, SLOWER, IdleCause
from nearpeak.diagnose.profile import Profile
from nearpeak.units import percent, seconds

LEAST = 0.1
"""Of the step: what is idle for less of it gains too little by a graph to be worth its constraints."""
IN_GRAPH = 1e-6
"""Seconds between two kernels of a graph, where it was not measured."""


@rule("launch-bound", needs=["host"], general=True)
def launch_bound(step: Examined) -> Iterator[Waste]:
    """Idle time in which the host was launching, or between two ops, beyond what remains with a CUDA graph."""
    profile = step.profile
    late = late_launches(profile)
    if step.machine.kind != "gpu" or not late or breaks(step):  # of breaks, "graph-breaks" has more to say
        return
    idle_s = sum(cause.seconds for cause in late)
    clean_s = clean_seconds(profile, idle_s)
    kernels = sum(op.kernels for op in profile.ops)
    if not kernels:  # all of them are in CUDA graphs already
        return
    gaps = min(kernels, max(cause.count for cause in late))
    launch = step.machine.achievable.launch.in_graph if step.machine.achievable else None
    remains_s = gaps * (launch or IN_GRAPH)
    if clean_s - remains_s < LEAST * profile.wall_s:
        return
    waits = sum(cause.count for cause in profile.idle if cause.cause == "synchronisation")
    yield Waste(
        title="The device waits for the host: ops are launched more slowly than they run.",
        at=None,
        idle=claimed(late, clean_s - remains_s),
        evidence=f"{kernels:,} kernels ran for {seconds(profile.kernel_s)}, "
        f"{seconds(profile.kernel_s / max(1, kernels))} each; the device was idle for {seconds(idle_s)} of "
        f"{seconds(profile.wall_s)} because the next was not launched yet{_most_at(late)}.",
        reasoning=f"A CUDA graph launches them all at once. {seconds(remains_s)} remain between {gaps:,} kernels."
        + ("" if profile.steps else f" The step ran under the profiler, which makes the host {SLOWER:g} times slower."),
        remedy=_remedy(profile, waits),
    )


def breaks(step: Examined) -> tuple[GraphBreak, ...]:
    """Where compiled code of the step leaves its graphs."""
    return () if step.profile.compiler is None else step.profile.compiler.breaks


def late_launches(profile: Profile) -> list[IdleCause]:
    """Idle time in which the host was launching what comes next, or was between two ops."""
    kinds = (("launching", LATE), ("python", BETWEEN_OPS))
    return [cause for cause in profile.idle if (cause.cause, cause.what) in kinds]


def clean_seconds(profile: Profile, idle_s: float) -> float:
    """What of the idle time there is without the profiler, which makes the host slower."""
    if profile.steps:
        return idle_s
    return min(idle_s, max(0.0, profile.wall_s / SLOWER - profile.kernel_s))


def claimed(late: Sequence[IdleCause], saving_s: float) -> dict[str, float]:
    """A saving of these causes together, by the name of the cause."""
    total = sum(cause.seconds for cause in late)
    found: dict[str, float] = {}
    for cause in late:
        found[cause.cause] = found.get(cause.cause, 0.0) + cause.seconds * saving_s / total
    return found


def _most_at(late: Sequence[IdleCause]) -> str:
    most = max(late, key=lambda cause: cause.seconds)
    return f", most of it before {most.where}" if most.where else ""


def _remedy(profile: Profile, waits: int) -> str:
    times = profile.wall_s / profile.kernel_s if profile.kernel_s else 2.0
    first = f"First remove the {waits} synchronisations of the step: a graph cannot have them.\n" if waits > 1 else ""
    return (
        f"{first}step = torch.compile(step, mode='reduce-overhead')   # records CUDA graphs, and fuses ops\n"
        "graph = torch.cuda.CUDAGraph()                       # or by hand, with inputs that stay where they are\n"
        "with torch.cuda.graph(graph):\n"
        "    step()\n"
        "graph.replay()                                       # in every step\n"
        f"Or give each kernel more to do: a batch {times:.1f} times as large hides the launches. "
        f"The device works for {percent(profile.kernel_s / profile.wall_s)} of the step now."
    )
