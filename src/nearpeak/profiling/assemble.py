"""`StepRecords`: what the steps of a run recorded, and the `Profile` that is assembled from it.

A step runs more than once: profiled for its kernel times, traced for its storages and source lines. `align_ops` finds
the ops of one run in the other, by name and shapes, as a longest common subsequence. `attach_triton_launches` gives
kernels that the code launches past torch's dispatcher to the traced op of their launch. `attribute_idle` names the
causes of the idle time of the recorded step.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from nearpeak._stage_times import stage
from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.roofline import Ceilings
from nearpeak.findings.engine import add_findings
from nearpeak.findings.replay import StepReplay, step_timeline
from nearpeak.findings.step import StepFact
from nearpeak.machines.machine import Machine
from nearpeak.measure.statistics import median
from nearpeak.ops.cost import costs_of
from nearpeak.ops.graph import GraphNode, GraphReplay
from nearpeak.ops.op import Op, Trace, name_with_origin, name_without_origin
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.completeness import Completeness, Loss
from nearpeak.profiles.conditions import StepConditions
from nearpeak.profiles.idle import WORKERS_STARTED, IdleCause, IdleTime
from nearpeak.profiles.idle_attribution import DeviceActivity, HostActivity, attribute
from nearpeak.profiles.memory import peak_memory
from nearpeak.profiles.profile import (
    CompilerFacts,
    DeviceKernel,
    Profile,
    add_idle,
    add_step_spread,
    build_profile,
    calibration_notes,
    computed_dtypes,
    profile_ceilings,
)
from nearpeak.profiles.rank_timeline import RankTimeline
from nearpeak.profiles.rates import step_rates
from nearpeak.profiles.waterfall import merge_intervals
from nearpeak.profiling.loader_starts import WorkerStarts
from nearpeak.profiling.steps import is_similar_size
from nearpeak.trace.kineto.collectives import collective_named, collective_of
from nearpeak.trace.kineto.host import (
    PRINTED_TENSOR,
    HostSpan,
    generation_of_mark,
    intervals_outside,
    line_of_mark,
)
from nearpeak.trace.kineto.kernels import KernelRun
from nearpeak.trace.kineto.read import KinetoTrace, without_profiler
from nearpeak.trace.recorder import without_tf32
from nearpeak.trace.source import read_excerpts
from nearpeak.units import seconds

LIVE_FACTS: frozenset[StepFact] = frozenset({"storages", "lines", "host", "memory"})
"""What is known about the steps of a live run."""
UNTRACED_FACTS: frozenset[StepFact] = frozenset({"host"})
"""What is known without a trace."""
MIN_STARTED_SHARE = 0.02
"""Of the step: worker processes that cost less at the ends of epochs are not mentioned."""
SLOWDOWN = (1.01, 1.3)
"""A GPU that is at work loses this much of its clock, from the highest one to about the one that its power limit allows
for long. Steps that take even longer do something else."""
_UNTRACED_NOTE = (
    "The step was profiled and not traced: ops have neither source lines nor modules, and bounds follow from the "
    "shapes that the profiler recorded"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords:
    """The wall times of clean steps, one profiled step, and one traced step."""

    source: str
    step: str = ""
    """What was taken as a step, for people."""
    walls: Sequence[float]
    recorded: KinetoTrace
    profiled_wall: float
    traced: Trace | None
    untraced_reason: str = ""
    """Why there is no trace. Then the ops are those that the profiler recorded."""
    wall_s: float | None = None
    """Of a clean step, if the median of `walls` is not the best estimate."""
    notes: tuple[str, ...] = ()
    host_ahead: bool = False
    """Whether clean steps began while the device was still busy with the one before."""
    later_walls: tuple[float, ...] = ()
    """Of steps after everything was recorded, on the clock of a device that does not wait for its host."""
    compiler: CompilerFacts | None = None
    """None if torch.compile was not used."""
    conditions: StepConditions | None = None
    """What else the machine did while the clean and the profiled steps ran."""
    rank: int | None = None
    """Of the process in its torch.distributed group; None if there is no group."""
    world_size: int | None = None
    timeline: RankTimeline | None = None
    """Of the profiled steps, for the profile of the job."""
    worker_starts: WorkerStarts | None = None
    """What a data loader without persistent workers costs at the ends of epochs."""
    collections: tuple[float, ...] | None = None
    """Garbage collections in a clean step, by generation; None if they were not counted."""

    def profile(self, machine: Machine, *, ceilings: Ceilings = "achievable") -> Profile:
        """The profile: kernel times of the profiled step at the ops of the traced step."""
        clean = _as_in_clean_steps(_at_the_sustained_clock(self))
        return clean._profile(machine, ceilings)

    @property
    def later_s(self) -> float | None:
        """The time of a step after everything was recorded; None if it was not measured."""
        return median(list(self.later_walls)) if self.later_walls else None

    @property
    def slowdown(self) -> float:
        """How many times as long later steps take, if that is the clock of a GPU; otherwise 1."""
        if self.later_s is None:
            return 1.0
        change = self.later_s / (self.wall_s or median(list(self.walls)))
        return change if SLOWDOWN[0] < change <= SLOWDOWN[1] else 1.0

    def _profile(self, machine: Machine, ceilings: Ceilings) -> Profile:
        traced = self.traced
        with stage("alignment"):
            to_traced, matched = _align_steps(self.recorded, traced)
        wall = self.wall_s or median(list(self.walls))
        starts = self.worker_starts
        started_s = starts.seconds_per_step if starts is not None else 0.0
        if started_s < MIN_STARTED_SHARE * wall:
            started_s = 0.0
        notes = self.notes
        if traced is None:
            traced = self.recorded.trace
            notes = (*notes, *traced.notes, f"{_UNTRACED_NOTE} ({self.untraced_reason}).")
        if machine.kind == "cpu":
            traced = dataclasses.replace(traced, ops=without_tf32(traced.ops))
        traced = dataclasses.replace(
            traced, shapes_before=_shapes_before(self.recorded.trace.ops, traced.ops, to_traced)
        )
        lost = {index for op in self.recorded.partial if (index := to_traced[op]) is not None}
        traced = without_costs(traced, lost)
        in_graphs = match_graph_kernels(self.recorded.kernels, traced.replays)
        completeness = add_graph_loss(self.recorded.completeness, in_graphs)
        if self.traced is not None:  # else the notes of the recording say it
            notes = (*notes, *filter(None, [in_graphs.note]), *completeness.notes)
        kernels = attach_triton_launches(device_kernels(self.recorded, to_traced, in_graphs.ops), traced.ops)
        if not kernels:
            kernels = _cpu_kernels(self.recorded, to_traced, min(1.0, wall / self.profiled_wall))
        with stage("bounds"):
            estimate = estimate_trace(traced, machine, ceilings=ceilings)
        profile = build_profile(
            estimate,
            kernels,
            wall_s=wall + started_s,
            source=self.source,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=self.recorded.device,
            ceilings=profile_ceilings(machine, ceilings, computed_dtypes(estimate)),
        )
        profile = add_step_spread(profile, kernels, self.recorded.repeats)
        with stage("idle time"):
            idle = attribute_idle(
                self.recorded,
                idle_s=max(0.0, profile.waterfall.seconds("idle") - started_s),
                clean=True,
                host_ahead=self.host_ahead,
                traced=traced.ops,
                to_traced=to_traced,
            )
        if starts is not None and started_s:
            idle = _with_worker_starts(idle, starts)
            notes = (
                *notes,
                f"Every {starts.epoch_steps:.0f} steps a data loader ends its workers and starts others, for "
                f"{seconds(starts.start_s)}: the time of a step has {seconds(started_s)} of it.",
            )
        profile = dataclasses.replace(
            add_idle(profile, idle),
            step=self.step,
            steps=len(self.walls),
            walls=tuple(self.walls),
            spread=spread_of(self.walls, wall),
            matched=matched,
            profiled_s=self.profiled_wall,
            notes=(*profile.notes, *notes, *calibration_notes(machine, estimate)),
            rates=step_rates(traced, estimate, machine, wall_s=profile.wall_s, kernel_s=profile.kernel_s),
            memory=None if traced.lives is None else peak_memory(traced.lives, traced.ops),
            compiler=self.compiler,
            completeness=completeness,
            conditions=self.conditions,
            later_s=self.later_s,
            rank=self.rank,
            world_size=self.world_size,
        )
        replay = None  # on a CPU the host is the device: nothing overlaps, and times sum up
        if self.recorded.kernels:
            with stage("replay"):
                replay = _replay(self.recorded, kernels, traced.ops, to_traced, profile.wall_s)
        with stage("findings"):
            facts = LIVE_FACTS if self.traced is not None else UNTRACED_FACTS
            profile = add_findings(profile, traced, machine, facts, replay=replay)
        return dataclasses.replace(profile, excerpts=read_excerpts(_lines_of_interest(profile)))

    def update(self, profile: Profile, earlier: StepRecords) -> Profile | None:
        """`profile`, assembled from `earlier` records, with what these add; None if it must be assembled anew."""
        same = dataclasses.replace(earlier, later_walls=self.later_walls, conditions=self.conditions) == self
        if not same or self.slowdown != earlier.slowdown:
            return None
        return dataclasses.replace(profile, later_s=self.later_s, conditions=self.conditions)


def _at_the_sustained_clock(records: StepRecords) -> StepRecords:
    """The records as they would be of later steps, if a GPU has slowed down meanwhile.

    After a pause, a GPU runs faster than its power limit lets it for long, and the first clean steps and the profiled
    ones are too fast alike. The program runs at the pace of later steps, and so do all kernels of a GPU that never
    waits.
    """
    slowdown = records.slowdown
    if slowdown == 1.0:
        return records
    kernels = tuple(
        replace(kernel, start_s=kernel.start_s * slowdown, seconds=kernel.seconds * slowdown)
        for kernel in records.recorded.kernels
    )
    note = (
        f"The GPU slowed down while it worked: the step time is that of {len(records.later_walls)} later steps, and "
        f"the times of kernels are those that were recorded, times {slowdown:.3f}."
    )
    return replace(
        records,
        walls=records.later_walls,
        wall_s=records.later_s,
        recorded=replace(
            records.recorded,
            kernels=kernels,
            repeats=tuple(tuple(slowdown * one for one in row) for row in records.recorded.repeats),
        ),
        notes=(*records.notes, note),
    )


def _as_in_clean_steps(records: StepRecords) -> StepRecords:
    """The records without what the profiled step has more than clean ones have."""
    recorded = records.recorded
    if records.collections is not None:
        recorded = _with_usual_collections(recorded, records.collections)
    wall = records.wall_s or median(list(records.walls))
    return replace(records, recorded=without_profiler(recorded, wall))


def _with_usual_collections(recorded: KinetoTrace, per_step: Sequence[float]) -> KinetoTrace:
    """What was recorded with as many garbage collections as clean steps have; others are not part of the step.

    The collector counts objects of the whole process: a step that makes few of them has a collection once in a while,
    and the profiler makes objects too.
    """
    left = {generation: round(count) for generation, count in enumerate(per_step)}
    host = []
    for span in recorded.host:
        generation = generation_of_mark(span.name)
        if generation is not None:
            left[generation] = left.get(generation, 0) - 1
        host.append(replace(span, kind="profiler") if generation is not None and left[generation] < 0 else span)
    return replace(recorded, host=tuple(host))


def _lines_of_interest(profile: Profile) -> Iterator[str]:
    """The lines that reports name: of findings, of idle time, and of ops, those that lose most first."""
    yield from (finding.source for finding in profile.findings)
    yield from (cause.where for cause in profile.idle)
    lost: dict[str, float] = {}
    for op in profile.ops:
        lost[op.source] = lost.get(op.source, 0.0) + op.lost_s
    yield from sorted(lost, key=lambda source: -lost[source])


def _with_worker_starts(idle: IdleTime, starts: WorkerStarts) -> IdleTime:
    cause = IdleCause(
        cause="input",
        seconds=starts.seconds_per_step,
        count=round(starts.epoch_steps),
        where=starts.line,
        what=WORKERS_STARTED,
    )
    return idle._replace(causes=tuple(sorted((*idle.causes, cause), key=lambda item: -item.seconds)))


def spread_of(walls: Sequence[float], wall_s: float) -> float:
    """The slowest of clean steps less the fastest, over the step time; without the outer tenths if there are ten.

    >>> spread_of([9.0, 10.0, 11.0], 10.0), spread_of([10.0] * 9 + [19.0], 10.0)
    (0.2, 0.0)
    """
    ordered = sorted(walls)
    cut = len(ordered) // 10
    return (ordered[-1 - cut] - ordered[cut]) / wall_s


def _align_steps(recorded: KinetoTrace, traced: Trace | None) -> tuple[list[int | None], float | None]:
    """For each op of the profiled step its index in the traced step, and the share of ops that have one.

    On a device only ops that launched something count: views and host ops are in neither step, and a trace does not
    see the launches of CUDA graphs. Without a trace, the ops are the profiled step's own.
    """
    profiled_ops = recorded.trace.ops
    if traced is None:
        return list(range(len(profiled_ops))), None
    on_device = bool(recorded.kernels)
    launching = {kernel.op for kernel in recorded.kernels if not kernel.in_graph}
    is_view = [cost.family == "view" for cost in costs_of(traced.ops)]
    profiled = [index for index in range(len(profiled_ops)) if not on_device or index in launching]
    replayed = {index for replay in traced.replays for index in replay.ops}
    in_trace = [index for index, view in enumerate(is_view) if index not in replayed and (not on_device or not view)]
    keys = [_op_key(op) for op in traced.ops]
    light = {key.kind for key, view in zip(keys, is_view, strict=True) if view}
    profiled_keys, traced_keys = (
        [_op_key(profiled_ops[index]) for index in profiled],
        [keys[index] for index in in_trace],
    )
    positions = [
        position if position is None or _may_be_same(key, traced_keys[position]) else None
        for key, position in zip(profiled_keys, align_ops(profiled_keys, traced_keys, light), strict=True)
    ]
    to_traced: list[int | None] = [None] * len(profiled_ops)
    for index, position in zip(profiled, positions, strict=True):
        to_traced[index] = None if position is None else in_trace[position]
    if on_device:  # ops on the host are aligned among themselves: they take time of it, and have lines
        host = [index for index in range(len(profiled_ops)) if index not in launching and index not in recorded.partial]
        traced_host = [index for index, op in enumerate(traced.ops) if op.origin == "host"]
        names = [_bare_name(profiled_ops[index]) for index in host]
        for index, position in zip(
            host, align(names, [_bare_name(traced.ops[index]) for index in traced_host]), strict=True
        ):
            to_traced[index] = None if position is None else traced_host[position]
    # Views and empty tensors that torch makes for itself are in one of the steps alone, and cost nothing.
    costs = costs_of([profiled_ops[index] for index in profiled])
    found = [
        position is not None
        for position, cost in zip(positions, costs, strict=True)
        if on_device or cost.model != "formula" or cost.reads or cost.writes or cost.flops or cost.vector_flops
    ]
    return to_traced, sum(found) / len(found) if found else None


def _bare_name(op: Op) -> str:
    """The name of an operator without its namespace and overload: of some host ops a recording has no more."""
    name = name_without_origin(op.name).replace("::", ".").removeprefix("aten.")
    return name.partition(".")[0].rstrip("_")


def without_costs(trace: Trace, indices: Collection[int]) -> Trace:
    """The trace with ops of unknown cost in these places: kernels of theirs are lost, so their time says nothing."""
    if not indices:
        return trace
    ops = list(trace.ops)
    for index in indices:
        if ops[index].origin in ("torch", "inductor", "triton"):
            name = name_with_origin("unknown", name_without_origin(ops[index].name))
            ops[index] = replace(ops[index], name=name, origin="unknown")
    return replace(trace, ops=tuple(ops))


def device_kernels(
    recorded: KinetoTrace, to_traced: Sequence[int | None] | None = None, in_graphs: Mapping[int, int] | None = None
) -> list[DeviceKernel]:
    """What ran on the device, with the ops of another trace if `to_traced` maps to it.

    `in_graphs` has ops of that trace for kernels that graphs launched, by the index of the kernel.
    """

    def op_of(index: int, op: int | None) -> int | None:
        if in_graphs is not None and index in in_graphs:
            return in_graphs[index]
        return op if to_traced is None or op is None else to_traced[op]

    collectives = _collective_ops(recorded.trace.ops)
    return [
        DeviceKernel(
            name=kernel.name,
            start_s=kernel.start_s,
            seconds=kernel.seconds,
            op=op_of(index, kernel.op),
            stream=kernel.stream,
            collective=collective_of(kernel.name) or collectives.get(kernel.op),
            in_graph=kernel.in_graph,
        )
        for index, kernel in enumerate(recorded.kernels)
    ]


_FUSED_WITH_PRODUCTS = re.compile(r"_mm\b|_mm_|matmul|gemm|linear")


def _collective_ops(ops: Sequence[Op]) -> dict[int | None, str]:
    """The collectives that ops are, by index: their kernels may have any name."""
    found: dict[int | None, str] = {}
    for index, (op, cost) in enumerate(zip(ops, costs_of(ops), strict=True)):
        name = name_without_origin(op.name)
        if cost.family == "collective":
            found[index] = collective_named(name) or "unknown"
        elif op.origin == "unknown" and (kind := collective_of(name)) and not _FUSED_WITH_PRODUCTS.search(name):
            found[index] = kind
    return found


def _cpu_kernels(recorded: KinetoTrace, to_traced: Sequence[int | None], share: float) -> list[DeviceKernel]:
    """On a CPU, the ops are the kernels, and collectives run beside them on a thread of their backend.

    The profiler slows them down as it does the step: `share` corrects that.
    """
    collectives = _collective_ops(recorded.trace.ops)
    waits = merge_intervals(
        (span.start_s, span.start_s + span.seconds) for span in recorded.communication if span.is_wait
    )
    ops = [
        DeviceKernel(
            name=op.name,
            start_s=begin * share,
            seconds=(end - begin) * share,
            op=to_traced[index],
            collective=collectives.get(index),
        )
        for index, (op, (start, duration)) in enumerate(zip(recorded.trace.ops, recorded.spans, strict=True))
        if duration > 0.0
        for begin, end in intervals_outside([(start, start + duration)], () if index in collectives else waits)
    ]
    return ops + [
        DeviceKernel(
            name=span.name,
            start_s=span.start_s * share,
            seconds=span.seconds * share,
            op=None if span.op is None else to_traced[span.op],
            stream=1,
            collective=span.kind,
        )
        for span in recorded.communication
    ]


def attach_triton_launches(kernels: Sequence[DeviceKernel], ops: Sequence[Op]) -> list[DeviceKernel]:
    """The kernels, with ops for those that the code launches past torch's dispatcher.

    torch's profiler shows such a kernel without an op. A trace has an op for each launch of a Triton kernel, named
    after the kernel: the kernels of one name get these ops in order, if there are equally many.
    """
    launches: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if op.origin == "triton":
            launches.setdefault(name_without_origin(op.name), []).append(index)
    without_op: dict[str, list[int]] = {}
    for index in sorted(range(len(kernels)), key=lambda index: kernels[index].start_s):
        if kernels[index].op is None and kernels[index].name in launches:
            without_op.setdefault(kernels[index].name, []).append(index)
    attached = list(kernels)
    for name, indices in without_op.items():
        if len(indices) == len(launches[name]):
            for index, op_index in zip(indices, launches[name], strict=True):
                attached[index] = replace(attached[index], op=op_index)
    return attached


_TRACED_NAMES = {"aten._index_put_impl": "aten.index_put"}
"""Operators of autograd, and the ones that it calls under a trace instead."""


def _shapes_before(
    earlier: Sequence[Op], ops: Sequence[Op], to_ops: Sequence[int | None]
) -> dict[int, dict[str, tuple[int, ...]]]:
    """The shapes of arguments in an earlier step, if they were different, by the index of the op."""
    shapes = {}
    for op, index in zip(earlier, to_ops, strict=True):
        if index is not None and _op_key(op) != _op_key(ops[index]):
            now = ops[index].arguments
            shapes[index] = {
                name: value.shape
                for name, value in op.arguments.items()
                if isinstance(value, Tensor) and isinstance(now.get(name), Tensor) and now[name].shape != value.shape
            }
    return shapes


def _op_key(op: Op) -> OpKey:
    """What identifies an op in both steps.

    In-place and out-of-place variants are equal: under a trace, autograd accumulates gradients out of place. Lists of
    tensors do not count, since the profiler truncates long ones. A compiled kernel is identified by its name.
    """
    if op.origin in ("inductor", "triton"):
        name = name_without_origin(op.name)
        return OpKey(kind=name, exact=name)
    partial = op.origin in ("partial", "unknown")
    name = name_without_origin(op.name).replace("::", ".") if partial else op.packet
    name = name.rstrip("_")
    tensors = [value for key, value in op.arguments.items() if isinstance(value, Tensor) and key != "out"]
    shapes = [tensor.shape if tensor.sparse is None else tensor.sparse.shape for tensor in tensors]
    name = _TRACED_NAMES.get(name, name)
    return OpKey(kind=(name, *map(len, shapes)), exact=(name, *shapes), shapes=tuple(shapes))


def _may_be_same(key: OpKey, other: OpKey) -> bool:
    """Whether two ops of one kind may be the same op of two steps, by their sizes.

    A text grows and a batch is padded differently by a little; the rows of a tensor may be any number, such as the
    tokens of an expert.
    """
    return key.exact == other.exact or all(
        sum(not is_similar_size(*sizes) for sizes in zip(shape, now, strict=True)) <= 1
        for shape, now in zip(key.shapes, other.shapes, strict=True)
    )


_OP_LABELS: Mapping[str, str] = {
    "aten._local_scalar_dense": "item",
    "aten.item": "item",
    "aten.is_nonzero": "item",
    "aten._to_copy": "copy",
    "aten.copy_": "copy",
    "aten._copy_from": "copy",
}
"""Names of ops as in user code."""


def attribute_idle(
    recorded: KinetoTrace,
    *,
    idle_s: float,
    clean: bool,
    host_ahead: bool = False,
    traced: Sequence[Op] | None = None,
    to_traced: Sequence[int | None] | None = None,
) -> IdleTime:
    """The causes of `idle_s`, from the gaps of the profiled step.

    Args:
        recorded: The step under the profiler.
        idle_s: The idle time to attribute.
        clean: Whether that is the idle time of a step without the profiler.
        host_ahead: Whether clean steps began while the device was busy with the one before. The profiled step did not,
            since the device was synchronized: the time until its first kernel is not idle time of theirs.
        traced: The ops of another run of the step, which have source lines.
        to_traced: For each op of the recording its index there.
    """
    device, host = _activities(recorded, traced, to_traced)
    start = max(min((activity.start_s for activity in device), default=0.0), 0.0)
    host_end_s = recorded.host_end_s if recorded.kernels else recorded.wall_s
    end = max(max((activity.end_s for activity in device), default=0.0), host_end_s)
    return attribute(
        device,
        host,
        recorded.host_working if recorded.kernels else None,
        window=(start if host_ahead else min(recorded.free_from_s, start), end),
        idle_s=idle_s,
        clean=clean,
    )


def _activities(
    recorded: KinetoTrace,
    traced: Sequence[Op] | None,
    to_traced: Sequence[int | None] | None,
    kernels: Sequence[DeviceKernel] = (),
) -> tuple[list[DeviceActivity], list[HostActivity]]:
    """What the device and the host did, with the lines and indices of traced ops; `kernels` are the profile's."""
    ops = recorded.trace.ops

    def index_of(op: int | None) -> int | None:
        return op if op is None or to_traced is None else to_traced[op]

    def place_of(op: int | None) -> str:
        index = index_of(op)
        if index is None:  # in a range of nearpeak's, the line is known all the same
            return "" if op is None else ops[op].source
        return (ops if traced is None else traced)[index].place

    # Ops inside of `torch.tensor` and the like are in no trace: the next op that is has nearly the same line.
    places = [place_of(op) for op in range(len(ops))]
    for op in range(len(ops) - 2, -1, -1):
        places[op] = places[op] or places[op + 1]
    if recorded.kernels:
        device = [
            DeviceActivity(
                kernel.start_s,
                kernel.start_s + kernel.seconds,
                kernel.launched_s,
                "" if kernel.op is None else places[kernel.op],
                kernels[number].op if kernels else index_of(kernel.op),
                kernel.stream,
                kernels[number].communication if kernels else False,
                kernel.in_graph,
                None if kernel.op is None else sum(recorded.spans[kernel.op]),
                kernel.kind == "memcpy",
            )
            for number, kernel in enumerate(recorded.kernels)
        ]
    else:  # on a CPU, the ops are the kernels
        device = [
            DeviceActivity(start, start + duration, None, places[op], index_of(op))
            for op, (start, duration) in enumerate(recorded.spans)
        ]
        device += [
            DeviceActivity(
                span.start_s,
                span.start_s + span.seconds,
                None,
                "" if span.op is None else places[span.op],
                index_of(span.op),
                stream=1,
                communication=True,
            )
            for span in recorded.communication
        ]
    host = [
        HostActivity(
            span.kind,
            span.start_s,
            span.start_s + span.seconds,
            line_of_mark(span.name) or place_of(span.op),
            _describe_span(span, ops),
            index_of(span.op),
        )
        for span in recorded.host
    ]
    return device, host


def _replay(
    recorded: KinetoTrace,
    kernels: Sequence[DeviceKernel],
    traced: Sequence[Op],
    to_traced: Sequence[int | None],
    wall_s: float,
) -> StepReplay:
    """The model of the host and the device of the recorded step, calibrated to the clean one."""
    device, host = _activities(recorded, traced, to_traced, kernels)
    timeline = step_timeline(
        device,
        host,
        recorded.host_working,
        recorded.host_events,
        host_end_s=recorded.host_end_s,
        device_free_s=recorded.free_from_s,
    )
    return StepReplay(timeline, wall_s)


def _describe_span(span: HostSpan, ops: Sequence[Op]) -> str:
    if span.kind == "input":
        return "DataLoader with workers" if "_MultiProcessing" in span.name else "DataLoader"
    if span.kind == "garbage collection":
        return ""
    if span.name.startswith(PRINTED_TENSOR):
        return "print"
    if span.kind in ("synchronization", "host ops") and span.op is not None:
        op = ops[span.op]
        if op.origin in ("partial", "unknown", "host"):
            return name_without_origin(op.name).removeprefix("aten::").removeprefix("aten.")
        return _OP_LABELS.get(op.packet, op.packet.removeprefix("aten."))
    return span.name.partition(" (dynamo_timed)")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKernels:
    """What is known about the kernels that graphs launched."""

    ops: Mapping[int, int]
    """The op of each kernel that has one, by the index of the kernel."""
    lost: int
    """The number of nodes without a kernel in the recording, although their graph was launched."""
    note: str
    """A sentence about kernels in graphs that have no op; "" if there are none."""


def match_graph_kernels(kernels: Sequence[KernelRun], replays: Sequence[GraphReplay]) -> GraphKernels:
    """Finds the ops of kernels in graphs.

    Of each graph, the nodes are known in the order in which they were added, each with its op and with the nodes that
    it waits for (`trace/graphs.py`). A kernel is that of a node only if its name, its grid and its block are the same.
    Among nodes that look the same, the order of time tells where it must be that of the nodes; elsewhere nothing does.

    Args:
        kernels: What ran in the profiled step.
        replays: The graphs that were launched in the traced step.
    """
    launches: dict[tuple[float, int], list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.replay is not None:
            launches.setdefault((kernel.replay.start_s, kernel.replay.graph), []).append(index)
    ordered = sorted(launches)
    ops: dict[int, int] = {}
    lost = 0
    counterparts = align([graph for _, graph in ordered], [replay.graph for replay in replays])
    for launch, replayed in zip(ordered, counterparts, strict=True):
        if replayed is None:
            continue
        nodes = replays[replayed].nodes
        indices, in_order = _in_node_order(kernels, launches[launch])
        lost += max(0, len(nodes) - len(indices))
        for place, node in _match_nodes([kernels[index] for index in indices], nodes, in_order=in_order):
            op = nodes[node].op
            if op is not None:
                ops[indices[place]] = op
    return GraphKernels(ops=ops, lost=lost, note=_note(kernels, ops, replays))


def add_graph_loss(completeness: Completeness, kernels: GraphKernels) -> Completeness:
    """What a recording lacks, with the kernels that graphs have and the recording does not."""
    counted = sum(loss.count or 0 for loss in completeness.of_step if loss.kind == "kernels")
    if kernels.lost <= counted:  # by the other replays of the graph
        return completeness
    text = f"{kernels.lost} kernels that CUDA graphs were seen to run at their capture are not in the recording."
    loss = Loss(kind="kernels", count=kernels.lost - counted, in_step=True, text=text)
    return replace(completeness, losses=(*completeness.losses, loss))


def _in_node_order(kernels: Sequence[KernelRun], indices: Sequence[int]) -> tuple[list[int], bool]:
    """The kernels of one launch, and whether that is the order of their nodes; else it is that of time."""
    node_ids = {index: replay.node for index in indices if (replay := kernels[index].replay) is not None}
    if None in node_ids.values() or len(set(node_ids.values())) < len(indices):
        return sorted(indices, key=lambda index: kernels[index].start_s), False
    return sorted(indices, key=lambda index: node_ids[index] or 0), True


def _match_nodes(runs: Sequence[KernelRun], nodes: Sequence[GraphNode], *, in_order: bool) -> list[tuple[int, int]]:
    """Places of kernels, and of nodes that have their op."""
    names = {node.name for node in nodes if node.kind == "kernel"}
    named = "" not in names  # an older driver does not tell
    # A driver runs some copies and fills by kernels of its own (`memcpy32_post`): then they look the same.
    of_driver = {run.name for run in runs if named and run.kind == "kernel"} - names

    def key_of_run(run: KernelRun) -> Hashable:
        if run.kind != "kernel" or run.replay is None or run.name in of_driver:
            return "copy or fill" if of_driver else run.kind
        return run.name * named, run.replay.grid, run.replay.block

    def key_of_node(node: GraphNode) -> Hashable:
        if node.kind != "kernel":
            return "copy or fill" if of_driver else node.kind
        return node.name * named, node.grid, node.block

    kernels = [key_of_run(run) for run in runs]
    keys = [key_of_node(node) for node in nodes]
    if in_order and kernels == keys:
        return [(place, place) for place in range(len(keys))]
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(kernels):
        places.setdefault(key, []).append(place)
    alike: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        alike.setdefault(key, []).append(number)
    matched = []
    for key, found in places.items():
        numbers = alike.get(key, [])
        if len({nodes[number].op for number in numbers}) == 1 and len(found) <= len(numbers):
            matched += [(place, numbers[0]) for place in found]
        elif len(found) == len(numbers) and _runs_in_order(numbers, nodes):
            matched += list(zip(found, numbers, strict=True))
    return matched


def _runs_in_order(numbers: Sequence[int], nodes: Sequence[GraphNode]) -> bool:
    """Whether nodes of different ops begin in the order of their numbers."""
    groups = [list(group) for _, group in groupby(numbers, key=lambda number: nodes[number].op)]
    for earlier, later in pairwise(groups):
        bits = sum(1 << number for number in earlier)
        if any((before := nodes[number].earlier) is None or before & bits != bits for number in later):
            return False
    return True


def _note(kernels: Sequence[KernelRun], ops: Mapping[int, int], replays: Sequence[GraphReplay]) -> str:
    inside = [kernel for index, kernel in enumerate(kernels) if kernel.in_graph and index not in ops]
    if not inside:
        return ""
    total = sum(kernel.seconds for kernel in inside)
    traced = {replay.graph for replay in replays}
    reasons = {
        "their graphs were captured before nearpeak watched, or by other means than torch's; let what is profiled "
        "capture them": sum(kernel.replay is None for kernel in inside),
        "their graphs were not launched in the step that was traced": sum(
            kernel.replay is not None and kernel.replay.graph not in traced for kernel in inside
        ),
        "no op was seen to add them at the capture, or ops that run side by side have the same kernels": sum(
            kernel.replay is not None and kernel.replay.graph in traced for kernel in inside
        ),
    }
    why = "; or ".join(reason for reason, count in reasons.items() if count)
    return (
        f"{len(inside)} kernels of {total * 1e3:.3f} ms were launched by CUDA graphs and have no ops, so they are "
        f"measured without bounds: {why}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKey:
    """What identifies an op in two runs of a step."""

    kind: Hashable
    """Its name and the number of dimensions of its tensors, which do not change from step to step."""
    exact: Hashable
    """The same with all sizes."""
    shapes: tuple[tuple[int, ...], ...] = ()


def align(keys: Sequence[Hashable], others: Sequence[Hashable]) -> list[int | None]:
    """For each key the index of its counterpart in `others`, or None: a longest common subsequence.

    The rows of the usual table are bit vectors (Crochemore et al., 2001; Hyyrö, 2004): a zero bit is a column where the
    length grows. A row takes two additions of long integers, so that steps of 10,000 ops are aligned in 0.1 s.

    >>> align(["mm", "add", "mul", "sum"], ["mm", "cast", "mul", "sum"])
    [0, None, 2, 3]
    """
    positions: list[int | None] = [None] * len(keys)
    shorter = min(len(keys), len(others))
    start = next((at for at in range(shorter) if keys[at] != others[at]), shorter)
    end = next((at for at in range(shorter - start) if keys[-1 - at] != others[-1 - at]), shorter - start)
    for at in range(start):
        positions[at] = at
    for at in range(end):
        positions[len(keys) - 1 - at] = len(others) - 1 - at

    columns: dict[Hashable, int] = {}  # the bits of the columns of each key
    for column, other in enumerate(others[start : len(others) - end]):
        columns[other] = columns.get(other, 0) | 1 << column
    rows = [(1 << (len(others) - end - start)) - 1]
    for key in keys[start : len(keys) - end]:
        row = rows[-1]
        common = row & columns.get(key, 0)
        rows.append((row + common | row - common) & rows[0])
    row_at, column = len(rows) - 1, len(others) - end - start
    while row_at and column:
        bit = 1 << (column - 1)
        if rows[row_at] & bit:
            column -= 1
        elif rows[row_at - 1] & bit:
            row_at, column = row_at - 1, column - 1
            positions[start + row_at] = start + column
        else:
            row_at -= 1
    return positions


def align_ops(keys: Sequence[OpKey], others: Sequence[OpKey], light: Collection[Hashable] = ()) -> list[int | None]:
    """For each op the index of its counterpart, an op of the same kind, or None; indices increase.

    Ops of equal sizes are aligned first, and the rest between them by kind. In a step whose sizes all change, the few
    ops of equal sizes mislead: then the alignment by kind alone finds more. Ops whose kind is `light` are aligned
    between the others, since one run may have many views that the other does not have.

    >>> one = [OpKey(kind=name, exact=(name, size)) for name, size in [("mm", 1), ("mm", 2), ("add", 7)]]
    >>> other = [OpKey(kind=name, exact=(name, size)) for name, size in [("mm", 2), ("add", 8)]]
    >>> align_ops(one, other)
    [None, 0, 1]
    """
    kinds, other_kinds = [key.kind for key in keys], [key.kind for key in others]
    exact, other_exact = [key.exact for key in keys], [key.exact for key in others]

    def fill(
        positions: list[int | None], some: Sequence[Hashable], other_some: Sequence[Hashable], *, heavy: bool
    ) -> None:
        """Aligns ops between those that have a position: the light ones, or the others."""
        pairs = [(index, position) for index, position in enumerate(positions) if position is not None]
        for (left, right), (left_end, right_end) in pairwise([(-1, -1), *pairs, (len(keys), len(others))]):
            indices = [index for index in range(left + 1, left_end) if (kinds[index] in light) != heavy]
            other_indices = [index for index in range(right + 1, right_end) if (other_kinds[index] in light) != heavy]
            if indices and other_indices:
                matches = align([some[index] for index in indices], [other_some[index] for index in other_indices])
                for index, match in zip(indices, matches, strict=True):
                    positions[index] = None if match is None else other_indices[match]

    def found(*steps: tuple[Sequence[Hashable], Sequence[Hashable]]) -> list[int | None]:
        positions: list[int | None] = [None] * len(keys)
        for heavy in (True, False):
            for some, other_some in steps:
                fill(positions, some, other_some, heavy=heavy)
        return positions

    by_size = found((exact, other_exact), (kinds, other_kinds))
    if None not in by_size:
        return by_size
    by_kind = found((kinds, other_kinds))
    return by_size if by_size.count(None) <= by_kind.count(None) else by_kind
