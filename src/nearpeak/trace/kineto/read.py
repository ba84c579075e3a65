"""`read_trace`: a file of torch.profiler as a `Trace` and its measured kernels.

Of several profiled steps that run the same kernels, the median step is read: the clock of a GPU at its power limit
varies by some percent from step to step.

On a CPU, `typical_times` gives ops the times of steps like theirs. Another process may interrupt any op of a step for
milliseconds, and the garbage collector runs in some step, so one step says little about its ops: each op, and each time
between two ops, gets the median of its shares of several steps that run the same ops. The profiler takes time for every
event. How much follows from a clean step, and is subtracted from each op: otherwise small ops would appear longer, and
large ones shorter, than they are.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from nearpeak._files import InputFile
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.ops.op import SeenOptimizer, Trace
from nearpeak.profiles.completeness import Completeness, Loss
from nearpeak.profiles.waterfall import Interval
from nearpeak.trace.kineto.arguments import RecordedTensor
from nearpeak.trace.kineto.calls import (
    OPTIMIZER_PREFIX,
    STEP_PREFIX,
    OpCall,
    OpCalls,
    ProfilerStep,
    find_op_calls,
    is_within,
)
from nearpeak.trace.kineto.collectives import communication_waits, host_collectives
from nearpeak.trace.kineto.host import (
    HostCall,
    HostSpan,
    blocking_copies,
    busy_intervals,
    event_starts,
    host_end,
    host_spans,
    intervals_outside,
    overhead_calls,
)
from nearpeak.trace.kineto.kernels import (
    KernelRun,
    LaunchedSpan,
    graph_note,
    is_in_graph,
    kernel_runs,
    launch_times,
    owner_of,
    seconds_by_op,
)
from nearpeak.trace.kineto.markers import Marker, find_markers, marker_losses
from nearpeak.trace.kineto.ops import RecordedOps, build_ops
from nearpeak.trace.kineto.recording import DeviceSpan, Recording, Span, load_recording
from nearpeak.trace.kineto.truncated_lists import (
    KernelLaunch,
    TruncatedLists,
    has_truncated_lists,
    min_gathered,
    restore_lists,
)
from nearpeak.trace.recorder import seen_optimizer

_GATHER_OPERATOR = "aten::index"
MAX_EVENT_S = 8e-6
"""What the profiler takes for an event on a CPU, with shapes, at most: 0.7 to 1.7 us on a Xeon in loops of one op, and
3 to 6 us in the step of a model. A profiled step that takes longer was slower as a whole."""
_LEAST_LEFT = 0.15
"""The share of a recorded time that remains at least without the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """The content of a trace file: one step, or all of it."""

    path: str
    trace: Trace
    kernels: tuple[KernelRun, ...]
    """In order of time; empty where the file has no device."""
    spans: tuple[tuple[float, float], ...]
    """Start and duration of each op on the CPU, in seconds from the start of what was read."""
    device: str
    """The device as its driver names it, or "cpu"."""
    steps: tuple[int, ...]
    """Numbers of the steps in the file with ops or launches of CUDA graphs."""
    step: int | None
    """The one that was read; None for all of the file."""
    wall_s: float
    """Duration of the step on the CPU, or of its kernels from first to last where that is longer."""
    notes: tuple[str, ...]
    """What the file does not show."""
    partial: frozenset[int] = frozenset()
    """Ops that may have more kernels than the file has, because it is truncated or lost some. Their measured times say
    nothing about their speed."""
    communication: tuple[CommunicationSpan, ...] = ()
    """On a CPU: the work of collectives on the threads of their backend, and waits for it."""
    host: tuple[HostSpan, ...] = ()
    """Host activity that can leave the device idle, in the order of time."""
    host_working: tuple[tuple[float, float], ...] = ()
    """When any thread was inside of an op or a call of the device's runtime: starts and ends, disjoint, in order."""
    host_events: tuple[float, ...] = ()
    """When the events began that the profiler recorded on the host, in order."""
    host_end_s: float = 0.0
    """When the host was done with the step."""
    free_from_s: float = 0.0
    """When the device had finished what was launched before."""
    compiled_regions: frozenset[str] = frozenset()
    """Compiled code that ran, by the names that torch gives it: "Torch-Compiled Region: 0/1"."""
    completeness: Completeness = field(default_factory=Completeness)
    """What the file is known to lack."""
    repeats: tuple[tuple[float, ...], ...] = ()
    """Seconds of each kernel in all profiled steps with the same kernels, in order; empty if one step was read."""

    @property
    def device_seconds(self) -> Mapping[int | None, float]:
        """Measured device time by the index of the op; under None what belongs to none."""
        return seconds_by_op(self.kernels)


class CommunicationSpan(NamedTuple):
    """Communication on a CPU: the work of a collective, or a wait for one."""

    kind: str
    """The collective; "unknown" for a wait."""
    name: str
    start_s: float
    seconds: float
    op: int | None
    """The index of the op that asked for it."""
    is_wait: bool = False
    """Whether the program waited meanwhile: an op around it did nothing."""


def read_trace(
    path: str | Path | InputFile,
    *,
    step: int | Literal["all"] | None = None,
    among: Collection[int] = (),
    storages: Literal["least", "likely"] = "least",
    markers: Sequence[Marker] = (),
) -> KinetoTrace:
    """The ops and kernels of a file that torch.profiler wrote with `record_shapes=True`.

    A step that only launches CUDA graphs has kernels and no ops.

    Args:
        path: A Chrome trace, as .json or .json.gz.
        step: The number of a step of the profiler's schedule, "all" for the whole file, or None for the last step; for
            the whole file where it has no steps. In a truncated file, None is the last step that is complete, or the
            first step if none is.
        among: Numbers of similar steps. Instead of the last step, the one whose kernels take the median time is read.
        storages: The file does not say which tensors share memory. "least" chooses what moves the fewest bytes, so that
            bounds are bounds; "likely" chooses what is usual, which is nearer to the truth and can be wrong.
        markers: The marker kernels that were planted while it was recorded.
    """
    if storages not in ("least", "likely"):
        raise UsageError(f"storages={storages!r} is not known. {did_you_mean(str(storages), ('least', 'likely'))}")
    # With the steps before a single one: a call that launches there and not here has lost its kernel, and what is
    # usual on a CPU takes several steps to tell.
    since = f"{STEP_PREFIX}{min(min(among), max(among) - 2)}" if among and step is None else None
    recording = load_recording(path, since=since)
    calls = find_op_calls(recording)
    recording, found_markers = find_markers(recording, calls)
    spans = [(span, owner_of(span, calls)) for span in recording.device_spans]
    _require_shapes(recording, path, graphs=any(is_in_graph(span, owner) for span, owner in spans))
    launching = {id(owner) for _, owner in spans}
    captured = _drop_captured(recording, calls, launching)
    times = launch_times(spans, calls)
    launched = [(times[id(span)], owner) for span, owner in spans] if recording.truncated else []
    chosen, steps = _choose_step(calls, step, path)
    if step is None and chosen is not None and recording.truncated:
        chosen = next((item for item in reversed(steps) if _is_whole(item, calls, launched)), steps[0])
    middle = find_median_step([item for item in steps if item.number in among], spans, times) if among else None
    if middle is not None:
        chosen = middle.step
    inside = [call for call in calls.calls if chosen is None or chosen.start <= call.span.start < chosen.end]
    # What the step launched: the device runs behind the CPU, often beyond the end of the step.
    start, end = (-math.inf, math.inf) if chosen is None else (chosen.start, chosen.end)
    earlier = [span for span, _ in spans if times[id(span)] < start or times[id(span)] == -math.inf]
    spans = [(span, owner) for span, owner in spans if start <= times[id(span)] < end and times[id(span)] > -math.inf]
    free_from = max([0.0, *((span.end - start) / 1e6 for span in earlier)]) if chosen is not None else 0.0
    origin, wall = _time_window(inside, spans, chosen)
    if all(call.kind == "graph" for call in inside):  # beside ops, the launch of a graph is an op of unknown results
        inside = []
    lost = _lost_calls(recording, calls)
    unlaunched, silent = [], {}
    if spans and not recording.truncated:
        silent = {key: call for key, call in _silent_calls(steps, calls, launching).items() if key not in lost}
        unlaunched = _without_launch(inside, launching, lost | set(silent))
        unlaunched += [call for call in inside if id(call) in silent]
    lost |= {id(call) for call in unlaunched}
    on_host = {id(call) for call in inside} - launching - lost if spans else set()
    recorded = build_ops(
        inside,
        tf32=has_tf32(recording.metadata, bool(recording.device_spans)),
        likely=storages == "likely",
        lists=_restore_truncated_lists(inside, spans, calls),
        on_host=on_host if not recording.truncated else (),
    )
    indices = {id(call): index for index, call in enumerate(inside)}
    kernels = kernel_runs(spans, indices, origin, calls)
    last = max([origin + wall * 1e6, *(span.end for span, _ in spans)])
    host = [*calls.host, *overhead_calls(recording), *blocking_copies(recording, calls.launches, calls.by_correlation)]
    if not recording.truncated:
        host += [HostCall("host ops", call.span, call) for call in inside if id(call) in on_host and _is_long(call)]
    partial = lost | (on_host if recording.truncated else set())
    cut = recording.truncated and not (chosen is not None and _is_whole(chosen, calls, launched))
    completeness = find_losses(
        recording,
        calls,
        spans,
        chosen,
        cut=cut,
        without_launch=unlaunched,
        elsewhere=len(set(silent) - {id(call) for call in inside}),
        live=bool(markers),
    )
    by_markers = marker_losses(markers, found_markers, None if chosen is None else chosen.number)
    completeness = replace(completeness, markers=len(markers), losses=(*completeness.losses, *by_markers))
    notes = (
        *trace_notes(recording, recorded, kernels, inside, chosen, cut=cut, storages=storages),
        *_left_out_notes(captured, [span for span in earlier if times[id(span)] == -math.inf]),
        *completeness.notes,
    )
    read = KinetoTrace(
        path=str(path),
        trace=Trace(
            ops=recorded.ops,
            storages=recorded.storages.facts(),
            results=frozenset(recorded.storages.results if storages == "likely" else ()),
            truncated=recording.truncated,
            guessed_storages=storages == "least",
            notes=notes,
            optimizers=_optimizers(
                span for span in calls.optimizers if chosen is None or chosen.start <= span.start < chosen.end
            ),
        ),
        kernels=kernels,
        spans=tuple(((call.span.start - origin) / 1e6, (call.span.end - call.span.start) / 1e6) for call in inside),
        device=device_name(recording),
        steps=tuple(item.number for item in steps),
        step=None if chosen is None else chosen.number,
        wall_s=wall,
        notes=notes,
        partial=frozenset(indices[number] for number in partial if number in indices),
        communication=() if spans else _communication(recording, inside, origin, last),
        host=host_spans(host, indices, origin, last),
        host_working=intervals_outside(
            busy_intervals(recording.threads.values(), origin, last),
            [((first - origin) / 1e6, (end - origin) / 1e6) for first, end in _host_loops(inside, on_host)],
        ),
        host_events=event_starts(recording.threads.values(), origin, last),
        host_end_s=host_end(recording.threads.values(), origin, origin + wall * 1e6 if chosen is None else chosen.end),
        free_from_s=free_from,
        repeats=() if middle is None else tuple(middle.seconds[id(span)] for span, _ in spans),
        completeness=completeness,
        compiled_regions=frozenset(
            region.name for region in calls.regions if chosen is None or chosen.start <= region.start < chosen.end
        ),
    )
    if spans or chosen is None or not among or recording.truncated:
        return read
    before = [item for item in steps if item.start < chosen.start and item.number > 0]  # the first starts the profiler
    recorded_steps = [_recorded_step(item, calls.calls, recording) for item in (chosen, *before)]
    return _with_times(read, typical_times(recorded_steps[0], recorded_steps[1:]))


def _communication(
    recording: Recording, inside: Sequence[OpCall], origin: float, last: float
) -> tuple[CommunicationSpan, ...]:
    """Communication on the host inside of a window, as far as it is in it."""
    index_of = {id(call.span): index for index, call in enumerate(inside)}
    spans = [
        (item.kind, item.name, item.start, item.end, index_of.get(id(item.call)), False)
        for item in host_collectives(recording.threads)
    ]
    spans += [
        ("unknown", span.name, span.start, span.end, index_of.get(id(span)), True)
        for span in communication_waits(recording.threads.values())
    ]
    return tuple(
        CommunicationSpan(
            kind, name, (max(start, origin) - origin) / 1e6, (min(end, last) - max(start, origin)) / 1e6, op, wait
        )
        for kind, name, start, end, op, wait in sorted(spans, key=lambda item: item[2])
        if end > origin and start < last
    )


def without_profiler(recorded: KinetoTrace, clean_s: float) -> KinetoTrace:
    """What was recorded on a CPU without the time of the profiler's events, where a clean step takes `clean_s`.

    The step takes as long as before: only the shares of it are other ones.
    """
    if recorded.kernels or not recorded.host_events:
        return recorded
    step = RecordedStep(
        names=(),
        ops=[(start, start + duration) for start, duration in recorded.spans],
        events=recorded.host_events,
        seconds=recorded.wall_s,
    )
    event_s = (recorded.wall_s - clean_s) / len(recorded.host_events)
    return _with_times(recorded, typical_times(step, event_s=min(max(event_s, 0.0), MAX_EVENT_S)))


def _recorded_step(step: ProfilerStep, calls: Sequence[OpCall], recording: Recording) -> RecordedStep:
    """The ops of a step on a CPU."""
    inside = [call.span for call in calls if step.start <= call.span.start < step.end]
    return RecordedStep(
        names=tuple(span.name for span in inside),
        ops=[((span.start - step.start) / 1e6, (span.end - step.start) / 1e6) for span in inside],
        events=event_starts(recording.threads.values(), step.start, step.end),
        seconds=(step.end - step.start) / 1e6,
    )


def _with_times(recorded: KinetoTrace, times: TypicalTimes | None) -> KinetoTrace:
    """What was recorded on a CPU with the times of a typical step."""
    if times is None:
        return recorded
    ops = times.intervals([(start, start + duration) for start, duration in recorded.spans])
    sent = times.intervals([(span.start_s, span.start_s + span.seconds) for span in recorded.communication])
    host = times.intervals([(span.start_s, span.start_s + span.seconds) for span in recorded.host])
    return replace(
        recorded,
        spans=tuple((start, end - start) for start, end in ops),
        communication=tuple(
            span._replace(start_s=start, seconds=end - start)
            for span, (start, end) in zip(recorded.communication, sent, strict=True)
        ),
        host=tuple(
            replace(span, start_s=start, seconds=end - start)
            for span, (start, end) in zip(recorded.host, host, strict=True)
        ),
        host_working=tuple(times.intervals(recorded.host_working)),
        host_events=tuple(map(times.time, recorded.host_events)),
        host_end_s=times.time(recorded.host_end_s),
    )


def _optimizers(spans: Iterable[Span]) -> tuple[SeenOptimizer, ...]:
    """The classes of torch.optim that took a step; of others, the file has a name alone."""
    names = dict.fromkeys(span.name.removeprefix(OPTIMIZER_PREFIX).partition(".")[0] for span in spans)
    kinds = [getattr(torch.optim, name, None) for name in names]
    return tuple(seen_optimizer(kind) for kind in kinds if isinstance(kind, type))


def _is_whole(step: ProfilerStep, calls: OpCalls, launched: Sequence[tuple[float, OpCall | None]]) -> bool:
    """Whether a truncated file has all of a step: it has something later of each thread that ran ops.

    Device events are written after all ops, thread by thread or together, in the order of the launches.
    """
    latest: dict[int, float] = {}
    for when, call in launched or [(call.span.start, call) for call in calls.calls]:
        if call is not None:
            latest[call.thread] = max(when, latest.get(call.thread, when))
    inside = {call.thread for call in calls.calls if not launched or step.start <= call.span.start < step.end}
    return all(latest.get(thread, -math.inf) >= step.end for thread in inside)


def _drop_captured(recording: Recording, calls: OpCalls, launching: Collection[int]) -> int:
    """Removes the ops that were recorded into a CUDA graph, and did not run; gives their number."""
    if not calls.captures or not recording.device_spans:
        return 0
    ran = [call for call in calls.calls if id(call) in launching or not is_within(calls.captures, call.span.start)]
    captured = len(calls.calls) - len(ran)
    calls.calls = ran
    return captured


def _lost_calls(recording: Recording, calls: OpCalls) -> set[int]:
    """The identities of calls whose kernels are not all in the file.

    Of a truncated file that may be the calls whose kernels were written last, of each stream.
    """
    lost = {id(call) for _, call in calls.missing_kernels if call is not None}
    if recording.truncated:
        lost |= {id(owner_of(span, calls)) for span in recording.last_written}
    return lost


_LEAST_ELEMENTS = 1024
"""Of an op that runs on the device: smaller tensors of one shape may as well be in host memory."""
_HOST_OR_DEVICE = ("copy", "to", "empty", "zero", "fill", "new_", "ones", "full")
"""Parts of the names of ops that host tensors have as often as those of the device."""


def _without_launch(calls: Sequence[OpCall], launching: Collection[int], lost: Collection[int]) -> list[OpCall]:
    """Ops without a launch, although most ops of the same name on the same tensors have one."""
    groups: dict[tuple[str, int], list[OpCall]] = {}
    for call in calls:
        if call.kind in ("operator", "inductor") and not any(part in call.span.name for part in _HOST_OR_DEVICE):
            groups.setdefault((call.span.name, id(call.span.inputs)), []).append(call)
    found = []
    for group in groups.values():
        silent = [call for call in group if id(call) not in launching]
        if not silent or 2 * len(silent) >= len(group):
            continue
        tensors = [item for item in group[0].arguments if isinstance(item, RecordedTensor)]
        # An op that ran on the host took its time there.
        longest = max(call.span.end - call.span.start for call in group if id(call) in launching)
        silent = [call for call in silent if call.span.end - call.span.start <= 2 * longest]
        if max((math.prod(tensor.shape) for tensor in tensors), default=0) >= _LEAST_ELEMENTS:
            found += [call for call in silent if id(call) not in lost]
    return found


LONG_HOST_OP = 200.0
"""Microseconds. Shorter ops on the host are the overhead of calling them."""


_LOOP_OPS = 64
"""So many ops in a row on tensors in the memory of the host are a loop of the host's, and no launching."""


def _host_loops(calls: Sequence[OpCall], on_host: Collection[int]) -> list[tuple[float, float]]:
    """When the host ran loops of short ops that launch nothing, in microseconds."""
    loops: list[tuple[float, float]] = []
    run: list[OpCall] = []
    for call in [*calls, None]:
        if call is not None and id(call) in on_host and (not run or call.thread == run[-1].thread):
            run.append(call)
            continue
        if len(run) >= _LOOP_OPS and run[-1].span.end - run[0].span.start >= LONG_HOST_OP:
            loops.append((run[0].span.start, run[-1].span.end))
        run = []
    return loops


def _is_long(call: OpCall) -> bool:
    return call.span.end - call.span.start >= LONG_HOST_OP


def _silent_calls(steps: Sequence[ProfilerStep], calls: OpCalls, launching: Collection[int]) -> dict[int, OpCall]:
    """Ops without a launch, although the same op has one in another step that runs the same ops; by identity."""
    starts = [call.span.start for call in calls.calls]
    equal_steps: dict[tuple[tuple[str, int], ...], list[list[OpCall]]] = {}
    for step in steps:
        inside = calls.calls[bisect_left(starts, step.start) : bisect_left(starts, step.end)]
        equal_steps.setdefault(tuple((call.span.name, id(call.span.inputs)) for call in inside), []).append(inside)
    return {
        id(call): call
        for group in equal_steps.values()
        for same in zip(*group, strict=True)
        if any(id(call) in launching for call in same)
        for call in same
        if id(call) not in launching
    }


def _require_shapes(recording: Recording, path: str | Path | InputFile, *, graphs: bool) -> None:
    """Raises for a file without ops or shapes. `graphs`: the file has kernels that CUDA graphs launched."""
    ops = [span for spans in recording.threads.values() for span in spans if span.kind == "op"]
    if graphs and not any("::" in span.name for span in ops):  # the ops are ranges of torch.compile
        return
    if not ops and recording.truncated:
        raise UsageError(f"{path} was cut off before its first op, so there is nothing to read. Record it again.")
    if not ops:
        raise UsageError(
            f"{path} has no ops of the CPU. Record it with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA], record_shapes=True)."
        )
    operators = [span for span in ops if "::" in span.name]  # others are ranges, of torch.compile for example
    if operators and not any(span.inputs is not None and span.inputs.types for span in ops):
        raise UsageError(
            f"{path} has {len(ops)} ops and no shapes, and without these nothing can be said about them. Record it "
            "again with torch.profiler.profile(record_shapes=True)."
        )


def _choose_step(
    calls: OpCalls, number: int | str | None, path: str | Path | InputFile
) -> tuple[ProfilerStep | None, Sequence[ProfilerStep]]:
    """The step to read, and all steps with ops. The last call of `step()` opens one in which nothing runs."""
    starts = [call.span.start for call in calls.calls]
    steps = [step for step in calls.steps if bisect_left(starts, step.start) < bisect_left(starts, step.end)]
    if number == "all" or (number is None and not steps):
        return None, steps
    if number is None:
        return steps[-1], steps
    for step in steps:
        if step.number == number:
            return step, steps
    numbers = ", ".join(str(step.number) for step in steps) or "none, so leave it out"
    raise UsageError(f"{path} has no step {number!r}. Its steps: {numbers}.")


def _restore_truncated_lists(
    calls: Sequence[OpCall], spans: Sequence[LaunchedSpan], everything: OpCalls
) -> dict[int, TruncatedLists]:
    """The lists that the profiler truncated, as far as they are known, by the identity of the call."""
    truncated = {
        id(call): call
        for call in calls
        if call.span.name == _GATHER_OPERATOR or has_truncated_lists(call.operator, call.arguments)
    }
    launches: dict[int, list[KernelLaunch]] = {}
    for span, owner in spans if truncated else ():
        if id(owner) in truncated:
            launches.setdefault(id(owner), []).append(KernelLaunch(span.name, span.blocks))
    steps = [call.span.start for call in everything.calls if call.phase == "optimizer"] if truncated else []
    restored = {}
    for number, call in truncated.items():
        if call.span.name == _GATHER_OPERATOR or call.operator is None:
            lists = min_gathered(call.arguments, launches.get(number, ()))
            if lists is not None:
                restored[number] = lists
            continue
        gradients = _gradients_before(call.span.start, everything, steps) if call.phase == "optimizer" else ()
        lists = restore_lists(call.operator, call.arguments, launches.get(number, ()), gradients)
        if lists is not None:
            restored[number] = lists
    return restored


def _gradients_before(time: float, calls: OpCalls, steps: Sequence[float]) -> list[RecordedTensor]:
    """The gradients that were accumulated since the last optimizer op before them; these ops start at `steps`."""
    last = bisect_left(calls.gradients, time, key=lambda item: item[0])
    if not last:
        return []
    earlier = bisect_left(steps, calls.gradients[last - 1][0])
    first = bisect_left(calls.gradients, steps[earlier - 1], key=lambda item: item[0]) if earlier else 0
    return [tensor for _, tensor in calls.gradients[first:last]]


def _time_window(
    calls: Sequence[OpCall], spans: Sequence[LaunchedSpan], step: ProfilerStep | None
) -> tuple[float, float]:
    """The start of what was read, in microseconds, and its duration in seconds."""
    starts = [span.start for span, _ in spans]
    ends = [span.end for span, _ in spans]
    device = max(ends) - min(starts) if spans else 0.0
    if step is not None:
        return step.start, max(step.end - step.start, device) / 1e6
    if not calls:
        return (min(starts) if starts else 0.0), device / 1e6
    first = min(call.span.start for call in calls)
    return first, (max([call.span.end for call in calls] + ends) - first) / 1e6


class MedianStep(NamedTuple):
    """A step, and the seconds of each of its kernels in all steps with the same kernels, by identity."""

    step: ProfilerStep
    seconds: Mapping[int, tuple[float, ...]]


def find_median_step(
    steps: Sequence[ProfilerStep], spans: Sequence[LaunchedSpan], times: Mapping[int, float]
) -> MedianStep | None:
    """The step whose kernels take the median time, among those that run the most common list of kernels.

    None if there are no kernels. Of two equally common lists, the later steps count. `times` are those of the launches.
    """
    spans_of_steps = _spans_by_step(steps, spans, times)
    steps_by_kernels: dict[tuple[tuple[int, str], ...], list[ProfilerStep]] = {}
    for step in reversed(steps):  # max() takes the first of equals
        if spans_of_steps[step.number]:
            steps_by_kernels.setdefault(
                tuple((span.stream, span.name) for span in spans_of_steps[step.number]), []
            ).append(step)
    if not steps_by_kernels:
        return None
    largest = max(steps_by_kernels.values(), key=len)
    chosen = sorted(largest)
    totals = {step.number: sum(span.duration for span in spans_of_steps[step.number]) for step in chosen}
    middle = sorted(chosen, key=lambda step: totals[step.number])[(len(chosen) - 1) // 2]
    columns = zip(*(spans_of_steps[step.number] for step in chosen), strict=True)
    seconds = [tuple(span.duration / 1e6 for span in column) for column in columns]
    return MedianStep(middle, {id(span): row for span, row in zip(spans_of_steps[middle.number], seconds, strict=True)})


def _spans_by_step(
    steps: Sequence[ProfilerStep], spans: Sequence[LaunchedSpan], times: Mapping[int, float]
) -> dict[int, list[DeviceSpan]]:
    """The spans that each step launched, in an order that does not depend on which stream is ahead."""
    ordered = sorted(steps, key=lambda step: step.start)
    starts = [step.start for step in ordered]
    launches: dict[int, list[tuple[float, int, float, DeviceSpan]]] = {step.number: [] for step in steps}
    for span, _ in spans:
        when = times[id(span)]
        index = bisect_right(starts, when) - 1
        if index >= 0 and when < ordered[index].end:
            launches[ordered[index].number].append((when, span.stream, span.start, span))
    return {
        number: [span for *_, span in sorted(launched, key=lambda item: item[:3])]
        for number, launched in launches.items()
    }


_AMPERE = 8
"""The first major compute capability of NVIDIA GPUs with tf32."""
_CDNA3 = (9, 4)
"""The compute capability of the AMD GPUs with tf32, gfx940 to gfx942, as their driver gives it."""


def device_name(recording: Recording) -> str:
    """The device that ran the kernels as its driver names it, or "cpu".

    ROCm numbers the agents of a machine in its kernels, CPUs among them, and not the devices. Then the name is known
    if all devices of the file have the same.
    """
    used = {span.device for span in recording.device_spans}
    if not used:
        return "cpu"
    names: list[str] = []
    for item in _device_properties(recording.metadata):
        name, number = item.get("name"), item.get("id")
        if isinstance(name, str) and name:
            if isinstance(number, int) and number in used:
                return name
            names.append(name)
    return " or ".join(dict.fromkeys(names)) or "unknown device"


def has_tf32(metadata: Mapping[str, Any], on_device: bool) -> bool:
    """Whether the device has tf32; True if the file does not describe it."""
    if not on_device:
        return False
    for item in _device_properties(metadata):
        major, minor = item.get("computeMajor"), item.get("computeMinor")
        if str(item.get("name")).startswith("AMD") or item.get("warpSize") == 64:
            return (major, minor) == _CDNA3
        return not isinstance(major, int) or major >= _AMPERE
    return True


def _device_properties(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    properties = metadata.get("deviceProperties")
    return [item for item in properties if isinstance(item, dict)] if isinstance(properties, list) else []


_STORAGE_NOTES = {
    "least": "The file has no addresses: a tensor may be any earlier one of its shape, strides and dtype, and "
    "arguments that agree in these may be one tensor. The bound counts the fewest bytes, so it can be well below that "
    "of a live trace, and the fused and ideal floors follow a guess at the data flow.",
    "likely": "The file has no addresses. Which tensors share memory is guessed, so the floors are estimates, not "
    "bounds.",
}


def trace_notes(
    recording: Recording,
    ops: RecordedOps,
    kernels: Sequence[KernelRun],
    calls: Sequence[OpCall],
    step: ProfilerStep | None,
    *,
    cut: bool,
    storages: Literal["least", "likely"],
) -> Iterator[str]:
    """Sentences about what the file does not show.

    Args:
        recording: All of the file.
        ops: The ops of what was read.
        kernels: Its kernels.
        calls: The calls of its ops.
        step: The step that was read; None for all of the file.
        cut: Whether parts of it may be missing.
        storages: How tensors that share memory were guessed.
    """
    if calls or not kernels:
        yield _STORAGE_NOTES[storages]
    if cut:
        what = "What was read" if step is None else f"Step {step.number}"
        yield f"{what} is incomplete: ops or kernels may be missing, and times are those of what the file has."
        if not recording.device_spans and recording.metadata.get("deviceProperties"):
            yield "The file has no kernels. They are written last, so it may have been truncated before them."
    unknown = ops.unknown - Counter(call.span.name for call in calls if call.kind == "graph")
    if unknown:
        listed = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(5))
        yield f"{unknown.total()} ops have no cost, because the file does not show enough of them: {listed}."
    if ops.exact_lists:
        yield (
            f"{ops.exact_lists} ops on long lists have the shapes of the gradients of the backward pass, which make as "
            "many chunks as their kernels have blocks."
        )
    if ops.min_lists:
        yield (
            f"{ops.min_lists} ops on long lists or with index tensors count a minimum of elements, from the blocks of "
            "their kernels."
        )
    compiled = sum(call.kind == "inductor" for call in calls)
    if compiled:
        yield (
            f"{compiled} compiled kernels count a minimum of bytes: the file does not say which part of a tensor they "
            "read, so a whole tensor counts only if no operator in their name reads a part of one."
        )
    if graphs := graph_note(kernels):
        yield graphs
    if recording.device_spans and calls:
        yield "Float32 matrix products count as tf32 where the device has it: the file does not have torch's setting."
    lost = [kernel for kernel in kernels if kernel.op is None and not kernel.in_graph]
    if lost:
        seconds = sum(kernel.seconds for kernel in lost)
        yield f"{len(lost)} kernels of {seconds * 1e3:.3f} ms belong to no op in the file."


def _left_out_notes(captured: int, earlier: Sequence[DeviceSpan]) -> Iterator[str]:
    """Sentences about what is in the file and did not run in it, or was launched before it."""
    if captured:
        yield f"{captured:,} ops were recorded into CUDA graphs and did not run: they are left out."
    if earlier:
        seconds = sum(span.duration for span in earlier) / 1e6
        yield (
            f"{len(earlier)} kernels of {seconds * 1e3:.3f} ms were launched before the recording began: they are left "
            "out."
        )


_DROPPED = re.compile(
    r"\b(?:dropp\w+|lost)\b[^\d]{0,20}(\d{1,15})|(\d{1,15})[^\d.;,]{0,40}\b(?:dropped|lost)\b", re.IGNORECASE
)
_STOPPED_EARLY = re.compile(
    r"stopped early\W*(?:1|true|yes)\b|out of (?:trace )?buffer|buffer\w* (?:is )?exceeded", re.I
)
"""What the profiler writes into the messages of a file when its buffers are full."""
_NUMBER = re.compile(r"\d{1,15}")
_LONGEST_MESSAGES = 10_000


def find_losses(
    recording: Recording,
    calls: OpCalls,
    spans: Sequence[LaunchedSpan],
    step: ProfilerStep | None,
    *,
    cut: bool,
    without_launch: Sequence[OpCall],
    elsewhere: int = 0,
    live: bool = False,
) -> Completeness:
    """What is missing, of the step and of the rest of the recording, from what it has.

    The ids of calls do not tell: calls that the profiler does not write, such as queries of events, have ids too, so
    that a complete recording has gaps.

    Args:
        recording: All of the file.
        calls: Its ops and launches.
        spans: What ran on the device in the step.
        step: The step that is read; None for all of the file.
        cut: Whether the file ends before everything of the step is written.
        without_launch: Ops of the step without a launch, although equal ops have one.
        elsewhere: The number of such ops in other steps.
        live: Whether it was recorded here: then every kernel must have a launch. Other files may have none by choice.
    """
    losses: list[Loss] = []

    def add(kind: Any, count: int | None, in_step: bool, text: str) -> None:
        losses.append(Loss(kind=kind, count=count, in_step=in_step, text=text))

    if recording.truncated:
        add("cut", None, cut, "The file is truncated; what follows its end is not in the trace.")
    if recording.damaged:
        add("damaged", recording.damaged, True, f"{_count(recording.damaged, 'event')} damaged and left out.")
    dropped = _dropped_events(recording.metadata)
    if dropped is not None:
        how_many = f"dropped {dropped:,} events" if dropped else "stopped before the end"
        add("dropped", dropped or None, True, f"The profiler says that it {how_many}: what they were is not known.")
    missing = [launch.start for launch, _ in calls.missing_kernels]
    inside = sum(step is None or step.start <= start < step.end for start in missing)
    short, short_elsewhere = _missing_in_graphs(recording, calls, spans)
    inside += short
    if inside:
        graphs = f", {short} of them of CUDA graphs that have more in other replays" if short else ""
        add(
            "kernels",
            inside,
            True,
            f"{_count(inside, 'kernel')} launched and not in the file{graphs}: their time is missing.",
        )
    if outside := len(missing) - (inside - short) + short_elsewhere:
        add("kernels", outside, False, f"{_count(outside, 'kernel')} launched outside of the step and not in the file.")
    if without_launch:
        names = ", ".join(f"{name} ({n})" for name, n in Counter(c.span.name for c in without_launch).most_common(3))
        text = f"{_count(len(without_launch), 'op')} without a kernel although equal ops have some: {names}."
        add("ops", len(without_launch), True, text)
    if elsewhere:
        text = f"{_count(elsewhere, 'op')} without a kernel in other steps although the same ops have some in this one."
        add("ops", elsewhere, False, text)
    unlaunched = sum((live or owner is None) and span.correlation not in calls.launches for span, owner in spans)
    if unlaunched:
        text = f"{_count(unlaunched, 'kernel')} in the file without a launch, so that ops may be missing too."
        add("launches", unlaunched, True, text)
    # The profiler names streams of earlier recordings too: an empty one tells something if launches lack their kernel.
    if recording.empty_streams and missing and not live:  # live, markers tell of streams
        text = f"{_count(recording.empty_streams, 'stream')} named in the file without anything that ran on it."
        add("streams", recording.empty_streams, True, text)
    launched = {span.correlation for span, _ in spans if span.correlation in calls.launches}
    return Completeness(launches=len(launched) + inside, losses=tuple(losses))


def _count(number: int, what: str) -> str:
    return f"1 {what} is" if number == 1 else f"{number:,} {what}s are"


def _dropped_events(metadata: Mapping[str, Any]) -> int | None:
    """The number of events that the profiler says it dropped; 0 if it says that it stopped early; None if neither."""
    dropped, early = 0, False
    for key, text in _messages(metadata):
        if "drop" in key.lower() and _NUMBER.fullmatch(text.strip()):
            dropped += int(text)
            continue
        for match in _DROPPED.finditer(text):
            dropped += int(match[1] or match[2])
        early = early or _STOPPED_EARLY.search(text) is not None
    return dropped if dropped or early else None


def _messages(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of the file, and the lists of messages that the profiler writes by level: INFO, WARNING, ERROR."""
    for key, value in metadata.items():
        for item in value[:_LONGEST_MESSAGES] if isinstance(value, list) else [value]:
            if isinstance(item, (str, int)) and not isinstance(item, bool):
                yield str(key), str(item)[:_LONGEST_MESSAGES]


def _missing_in_graphs(recording: Recording, calls: OpCalls, spans: Sequence[LaunchedSpan]) -> tuple[int, int]:
    """Kernels that replays lack, of the step and of others: all replays of one graph run the same kernels.

    Which graph it is tells the file, or the range that nearpeak adds around a replay.
    """
    sizes: dict[tuple[str, int], Counter[int]] = {}
    for span in recording.device_spans:
        launch = calls.by_correlation.get(span.correlation) if span.correlation is not None else None
        if span.correlation is None or launch is None:
            continue
        if launch.graph is not None:
            sizes.setdefault(("captured", launch.graph), Counter())[span.correlation] += 1
        elif span.graph is not None:
            sizes.setdefault(("in the file", span.graph), Counter())[span.correlation] += 1
    in_step: Collection[int | None] = {span.correlation for span, _ in spans}
    missing = [
        (max(replays.values()) - size, correlation in in_step)
        for replays in sizes.values()
        for correlation, size in replays.items()
    ]
    return sum(count for count, inside in missing if inside), sum(count for count, inside in missing if not inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The ops of a step and its events, in seconds from its start."""

    names: tuple[str, ...]
    ops: Sequence[Interval]
    """In the order of their start."""
    events: Sequence[float]
    """When the events of the profiler began, in order."""
    seconds: float

    def cuts(self) -> list[float]:
        """The starts and ends of ops, and the end of the step."""
        return [0.0, *(time for op in self.ops for time in op), self.seconds]

    def shares(self, event_s: float = 0.0) -> list[float]:
        """The time before each op, of the op, and after the last one, if `event_s` of each event is the profiler's."""
        lengths = []
        for start, end in pairwise(self.cuts()):
            events = bisect_left(self.events, end) - bisect_left(self.events, start)
            lengths.append(max(_LEAST_LEFT * (end - start), end - start - event_s * events))
        total = sum(lengths)
        return [length / total for length in lengths]


@dataclass(frozen=True, slots=True)
class TypicalTimes:
    """Maps times of a recorded step to those of the typical one, which takes as long."""

    recorded: Sequence[float]
    typical: Sequence[float]

    def time(self, recorded_s: float) -> float:
        """The time in the typical step."""
        last = len(self.recorded) - 2
        index = min(max(bisect_right(self.recorded, recorded_s) - 1, 0), last)
        start, end = self.recorded[index], self.recorded[index + 1]
        share = min(max((recorded_s - start) / (end - start), 0.0), 1.0) if end > start else 0.0
        return self.typical[index] + share * (self.typical[index + 1] - self.typical[index])

    def intervals(self, recorded: Sequence[Interval]) -> Iterator[Interval]:
        """Intervals in the typical step."""
        return ((self.time(start), self.time(end)) for start, end in recorded)


def typical_times(
    step: RecordedStep, others: Sequence[RecordedStep] = (), *, event_s: float = 0.0
) -> TypicalTimes | None:
    """The times of a step with the medians of its own and the others that run the same ops.

    `event_s` of each event is the profiler's. None if ops overlap, as those of several threads do.
    """
    same = [item for item in (step, *others) if item.names == step.names and _is_sequence(item)]
    if not _is_sequence(step):
        return None
    columns = zip(*(item.shares(event_s) for item in same), strict=True)
    typical = [median(column) for column in columns]
    scale = step.seconds / sum(typical)
    return TypicalTimes(step.cuts(), [0.0, *accumulate(scale * share for share in typical)])


def _is_sequence(step: RecordedStep) -> bool:
    """Whether one op follows the other inside of the step."""
    cuts = step.cuts()
    return bool(step.ops) and step.seconds > 0.0 and all(start <= end for start, end in pairwise(cuts))
