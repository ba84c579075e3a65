"""The device waits for the host to launch the next kernel.

launch-bound: The device waits for the host, which launches ops more slowly than they run.
graph-breaks: Compiled code has graph breaks, and the device waits for the host in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.loops import Loop, has_own_weights, slowest_line
from nearpeak.findings.step import Step
from nearpeak.profiles.idle import BETWEEN_OPS, LAUNCHED_LATE, PROFILER_SLOWDOWN, IdleCause
from nearpeak.profiles.profile import GraphBreak, Profile
from nearpeak.units import percent, seconds

MIN_IDLE_SHARE = 0.1
"""Of the step. With less idle time, a CUDA graph gains too little to be worth its constraints."""
_MOST_WAITS = 0.5
"""Of the time that the device waits for launches: a loop with more is where it waits."""
GRAPH_LAUNCH_S = 1e-6
"""Seconds between two kernels of a CUDA graph, if it was not measured."""


@rule("launch-bound", needs=["host"], general=True, compiles=True)
def launch_bound(step: Step) -> Iterator[Waste]:
    """Idle time in which the host was launching or between two ops, beyond what remains with a CUDA graph."""
    profile = step.profile
    late = late_launches(profile)
    if step.machine.kind != "gpu" or not late or breaks_of(step):  # reported by "graph-breaks"
        return
    inside = profile.ops_in_graphs
    kernels = sum(op.kernels for index, op in enumerate(profile.ops) if index not in inside)
    if not kernels:  # all kernels are in CUDA graphs already
        return
    idle_s = sum(cause.seconds for cause in late) * _share_outside_of_graphs(profile)
    clean_s = idle_without_profiler(profile, idle_s)
    gaps = min(kernels, max(cause.count for cause in late))
    launch = step.machine.achievable.launch.in_graph if step.machine.achievable else None
    remains_s = gaps * (launch or GRAPH_LAUNCH_S)
    if clean_s - remains_s < MIN_IDLE_SHARE * profile.wall_s:
        return
    waits = sum(cause.count for cause in profile.idle if cause.cause == "synchronization")
    loop = _loop_that_launches(step)
    yield Waste(
        title="The device waits for the host: ops are launched more slowly than they run.",
        op=None,
        source="" if loop is None else slowest_line(step, loop),
        idle=split_saving(late, clean_s - remains_s),
        launch_s={index: 0.0 for index, op in enumerate(profile.ops) if op.kernels and index not in inside},
        evidence=f"{kernels:,} kernels ran for {seconds(profile.kernel_s)}, "
        f"{seconds(profile.kernel_s / max(1, kernels))} each; the device was idle for {seconds(idle_s)} of "
        f"{seconds(profile.wall_s)} because the next was not launched yet{_slowest_place(late)}."
        + (
            ""
            if loop is None
            else f" Most of them are launched in the {len(loop.turns):,} turns of the loop at {loop.line}."
        ),
        reasoning=f"A CUDA graph launches them all at once. {seconds(remains_s)} remain between {gaps:,} kernels."
        + (
            ""
            if profile.steps
            else f" The step ran under the profiler, which makes the host {PROFILER_SLOWDOWN:g} times slower."
        ),
        remedy=_remedy(profile, waits),
    )


def _loop_that_launches(step: Step) -> Loop | None:
    """The loop that the device waits for most, apart from what other rules claim; not one over layers of their own."""
    waits = {
        index: op.launch_wait_s
        for index, op in enumerate(step.measured)
        if op.launch_wait_s and index not in step.claimed
    }
    loops = [
        (sum(waits.get(index, 0.0) for index in (*loop.members, *loop.backward_members)), number)
        for number, loop in enumerate(step.loops)
        if not has_own_weights(step, loop)
    ]
    waited_s, number = max(loops, default=(0.0, 0))
    return step.loops[number] if waited_s > _MOST_WAITS * sum(waits.values()) > 0.0 else None


def _share_outside_of_graphs(profile: Profile) -> float:
    """The share of the waiting for launches that is not before the launch of a CUDA graph.

    In a trace file, the launch of a graph is an op that waits. Live, no op is charged with it.
    """
    inside = profile.ops_in_graphs
    waits_s = sum(op.launch_wait_s for op in profile.ops)
    before_graphs_s = sum(profile.ops[index].launch_wait_s for index in inside)
    if inside and not before_graphs_s:
        return min(1.0, waits_s / sum(cause.seconds for cause in late_launches(profile)))
    return 1.0 - before_graphs_s / waits_s if before_graphs_s else 1.0


def breaks_of(step: Step) -> tuple[GraphBreak, ...]:
    """The graph breaks of the step."""
    return () if step.profile.compiler is None else step.profile.compiler.breaks


def late_launches(profile: Profile) -> list[IdleCause]:
    """Idle time in which the host was launching the next kernel, or was between two ops."""
    kinds = (("launching", LAUNCHED_LATE), ("python", BETWEEN_OPS))
    return [cause for cause in profile.idle if (cause.cause, cause.what) in kinds]


def idle_without_profiler(profile: Profile, idle_s: float) -> float:
    """The idle time without the profiler, which slows the host down."""
    if profile.steps:
        return idle_s
    return min(idle_s, max(0.0, profile.wall_s / PROFILER_SLOWDOWN - profile.kernel_s))


def split_saving(late: Sequence[IdleCause], saving_s: float) -> dict[str, float]:
    """A saving divided among causes, by the name of the cause."""
    total = sum(cause.seconds for cause in late)
    by_cause: dict[str, float] = {}
    for cause in late:
        by_cause[cause.cause] = by_cause.get(cause.cause, 0.0) + cause.seconds * saving_s / total
    return by_cause


def _slowest_place(late: Sequence[IdleCause]) -> str:
    longest = max(late, key=lambda cause: cause.seconds)
    return f", most of it before {longest.where}" if longest.where else ""


def _remedy(profile: Profile, waits: int) -> str:
    times = profile.wall_s / profile.kernel_s if profile.kernel_s else 2.0
    first = f"First remove the {waits} synchronizations of the step: a graph cannot have them.\n" if waits > 1 else ""
    return (
        f"{first}step = torch.compile(step, mode='reduce-overhead')   # records CUDA graphs, and fuses ops\n"
        "graph = torch.cuda.CUDAGraph()                       # or by hand, with inputs that stay where they are\n"
        "with torch.cuda.graph(graph):\n"
        "    step()\n"
        "graph.replay()                                       # in every step\n"
        f"Or give each kernel more to do: a batch {times:.1f} times as large hides the launches. "
        f"The device works for {percent(profile.kernel_s / profile.wall_s)} of the step now."
    )


ENQUEUE_S = 5e-6
"""Seconds of the host for a launch from compiled code, if it was not measured."""


@rule("graph-breaks", needs=["host"])
def graph_breaks(step: Step) -> Iterator[Waste]:
    """Idle time in which the host was between compiled regions, beyond the launches of one region."""
    profile = step.profile
    late = late_launches(profile)
    breaks = breaks_of(step)
    if step.machine.kind != "gpu" or not breaks or not late:
        return
    idle_s = sum(cause.seconds for cause in late)
    launch = (step.machine.achievable.launch.enqueue if step.machine.achievable else None) or ENQUEUE_S
    kernels = sum(op.kernels for op in profile.ops)
    remains_s = max(0.0, kernels * launch - profile.kernel_s)
    saving = idle_without_profiler(profile, idle_s) - remains_s
    if saving < MIN_IDLE_SHARE * profile.wall_s:
        return
    first = next((item for item in breaks if item.source), breaks[0])
    named = "; ".join(f"{item.source or 'an unknown line'} ({item.reason})" for item in breaks[:3])
    yield Waste(
        title="Compiled code has graph breaks, and the device waits for the host in between.",
        op=None,
        source=first.source,
        idle=split_saving(late, saving),
        launch_s={index: launch for index, op in enumerate(profile.ops) if op.kernels},
        evidence=f"torch.compile breaks its graphs at {len(breaks)} lines: {named}. The device was idle for "
        f"{seconds(idle_s)} of {seconds(profile.wall_s)} because the next kernel was not launched yet.",
        reasoning=f"In one graph the host launches a kernel in {seconds(launch)}. Beside {seconds(profile.kernel_s)} "
        f"of {kernels:,} kernels, {seconds(remains_s)} of waiting remain.",
        remedy="torch.compile(step, fullgraph=True)   # stops at the first break, and says why\n"
        "Take what it names out of the code that is compiled: prints, `.item()`, decisions on values, calls of other "
        "libraries. Then mode='reduce-overhead' records the whole as a CUDA graph.",
    )
