"""`read_trace`: a file of torch.profiler as a `Trace` and its measured kernels."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearpeak.capture.kineto.calls import Call, Calls, Step, calls_of
from nearpeak.capture.kineto.device import device_name, has_tf32
from nearpeak.capture.kineto.host import HostSpan, host_spans, overheads, waiting_copies, working
from nearpeak.capture.kineto.kernels import Kernel, is_in_graph, kernels_of, launched_at, owner_of, seconds_by_op
from nearpeak.capture.kineto.lists import Launch, LongLists, has_long_lists, least_gathered, long_lists
from nearpeak.capture.kineto.middle import middle_of
from nearpeak.capture.kineto.notes import notes_of
from nearpeak.capture.kineto.ops import ops_of
from nearpeak.capture.kineto.recording import DeviceSpan, Recording, load
from nearpeak.capture.kineto.tensors import Seen
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.work.op import Trace

_GATHER = "aten::index"


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """What a trace file says of one step, or of all of it."""

    path: str
    trace: Trace
    kernels: tuple[Kernel, ...]
    """In order of time; empty where the file has no device."""
    spans: tuple[tuple[float, float], ...]
    """Of each op on the CPU: when it began, from the start of what was read, and its seconds."""
    device: str
    """The device as its driver names it, or "cpu"."""
    steps: tuple[int, ...]
    """Numbers of the steps in the file that have ops, or launches of CUDA graphs."""
    step: int | None
    """The one that was read; None for all of the file."""
    wall_s: float
    """Of the step on the CPU, or of its kernels from the first to the last where that is longer."""
    notes: tuple[str, ...]
    """What the file cannot tell."""
    partial: frozenset[int] = frozenset()
    """Ops that may have had more kernels than the file has: it was cut off there, or lost some. What was measured of
    them says nothing about their speed."""
    host: tuple[HostSpan, ...] = ()
    """What the CPU did that can leave the device idle, in the order of time."""
    host_working: tuple[tuple[float, float], ...] = ()
    """When any thread was inside of an op or a call of the device's runtime: starts and ends, disjoint, in order."""
    free_from_s: float = 0.0
    """When the device was done with what had been launched before this."""
    compiled_regions: frozenset[str] = frozenset()
    """Code of torch.compile that ran, by the names that torch gives it: "Torch-Compiled Region: 0/1"."""
    repeats: tuple[tuple[float, ...], ...] = ()
    """Of each kernel, its seconds in all steps that were looked at and run the same kernels, in their order; empty
    where one step was."""

    @property
    def device_seconds(self) -> Mapping[int | None, float]:
        """Measured device time by the index of the op; under None what belongs to none."""
        return seconds_by_op(self.kernels)


def read_trace(
    path: str | Path,
    *,
    step: int | Literal["all"] | None = None,
    among: Collection[int] = (),
    storages: Literal["least", "likely"] = "least",
) -> KinetoTrace:
    """The ops and kernels of a file that torch.profiler wrote with `record_shapes=True`.

    A step that only launches CUDA graphs has kernels and no ops.

    Args:
        path: A Chrome trace, as .json or .json.gz.
        step: The number of a step of the profiler's schedule, "all" for the whole file, or None for the last step; for
            the whole file where it has no steps. Of a file that was cut off, None is the last step that is whole, or
            the first where none is.
        among: Numbers of steps that should be alike. Instead of the last step, the one of these counts whose kernels
            take the median time.
        storages: The file does not say which tensors share memory. "least" takes what moves the fewest bytes, so that
            the bounds are bounds; "likely" what is usual, which comes nearer and can be wrong.
    """
    if storages not in ("least", "likely"):
        raise UsageError(f"storages={storages!r} is not known. {did_you_mean(str(storages), ('least', 'likely'))}")
    recording = load(path)
    calls = calls_of(recording)
    spans = [(span, owner_of(span, calls)) for span in recording.device_spans]
    _must_have_shapes(recording, path, graphs=any(is_in_graph(span, owner) for span, owner in spans))
    launched = [(launched_at(span, calls, owner), owner) for span, owner in spans] if recording.truncated else []
    chosen, steps = _step(calls, step, path)
    if step is None and chosen is not None and recording.truncated:
        chosen = next((item for item in reversed(steps) if _is_whole(item, calls, launched)), steps[0])
    middle = middle_of([item for item in steps if item.number in among], spans, calls) if among else None
    if middle is not None:
        chosen = middle.step
    inside = [call for call in calls.calls if chosen is None or chosen.start <= call.span.start < chosen.end]
    free_from = 0.0
    if chosen is not None:
        before = [span.end for span, owner in spans if launched_at(span, calls, owner) < chosen.start]
        free_from = max(0.0, max(before, default=chosen.start) - chosen.start) / 1e6
        spans = [(span, owner) for span, owner in spans if _in_step(span, owner, calls, chosen)]
    origin, wall = _window(inside, spans, chosen)
    if all(call.kind == "graph" for call in inside):  # beside ops a launch is one of unknown results; alone it is none
        inside = []
    found = ops_of(
        inside,
        tf32=has_tf32(recording.metadata, bool(recording.device_spans)),
        likely=storages == "likely",
        lists=_long_lists(inside, spans, calls),
    )
    indices = {id(call): index for index, call in enumerate(inside)}
    kernels = kernels_of(spans, indices, origin, calls)
    last = max([origin + wall * 1e6, *(span.end for span, _ in spans)])
    host = [*calls.host, *overheads(recording), *waiting_copies(recording, calls.launches, calls.by_correlation)]
    partial = _partial(recording, calls)
    cut = recording.truncated and not (chosen is not None and _is_whole(chosen, calls, launched))
    notes = tuple(notes_of(recording, found, kernels, inside, chosen, cut=cut, storages=storages))
    return KinetoTrace(
        path=str(path),
        trace=Trace(
            ops=found.ops,
            storages=found.storages.facts(),
            results=frozenset(found.storages.results if storages == "likely" else ()),
            truncated=recording.truncated,
            guessed_storages=storages == "least",
            notes=notes,
        ),
        kernels=kernels,
        spans=tuple(((call.span.start - origin) / 1e6, (call.span.end - call.span.start) / 1e6) for call in inside),
        device=device_name(recording),
        steps=tuple(item.number for item in steps),
        step=None if chosen is None else chosen.number,
        wall_s=wall,
        notes=notes,
        partial=frozenset(indices[number] for number in partial if number in indices),
        host=host_spans(host, indices, origin, last),
        host_working=working(recording.threads.values(), origin, last),
        free_from_s=free_from,
        repeats=() if middle is None else tuple(middle.seconds[id(span)] for span, _ in spans),
        compiled_regions=frozenset(
            region.name for region in calls.regions if chosen is None or chosen.start <= region.start < chosen.end
        ),
    )


def _is_whole(step: Step, calls: Calls, launched: Sequence[tuple[float, Call | None]]) -> bool:
    """Whether a file that was cut off has all of a step: of each thread that ran ops, something later is there.

    What runs on the device is written after all ops, thread by thread or together, in the order of the launches.
    """
    latest: dict[int, float] = {}
    for when, call in launched or [(call.span.start, call) for call in calls.calls]:
        if call is not None:
            latest[call.thread] = max(when, latest.get(call.thread, when))
    inside = {call.thread for call in calls.calls if not launched or step.start <= call.span.start < step.end}
    return all(latest.get(thread, -math.inf) >= step.end for thread in inside)


def _partial(recording: Recording, calls: Calls) -> set[int]:
    """The identities of calls whose kernels may not all be there: those that were written last, of each stream."""
    found = {id(call) for call in calls.unanswered}
    if recording.truncated:
        found |= {id(owner_of(span, calls)) for span in recording.last_written}
    return found


def _must_have_shapes(recording: Recording, path: str | Path, *, graphs: bool) -> None:
    """An error for a file of which nothing can be said. `graphs`: it has kernels that CUDA graphs launched."""
    ops = [span for spans in recording.threads.values() for span in spans if span.kind == "op"]
    if graphs and not any("::" in span.name for span in ops):  # what is left are torch.compile's own marks
        return
    if not ops and recording.truncated:
        raise UsageError(f"{path} was cut off before its first op, so there is nothing to read. Record it again.")
    if not ops:
        raise UsageError(
            f"{path} has no ops of the CPU. Record it with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA], record_shapes=True)."
        )
    if not any(span.inputs is not None and span.inputs.types for span in ops):
        raise UsageError(
            f"{path} has {len(ops)} ops and no shapes, and without these nothing can be said about them. Record it "
            "again with torch.profiler.profile(record_shapes=True)."
        )


def _step(calls: Calls, wanted: int | str | None, path: str | Path) -> tuple[Step | None, Sequence[Step]]:
    """The step to read. One without ops was opened by the last call of `step()`, and nothing ran in it."""
    starts = [call.span.start for call in calls.calls]
    steps = [step for step in calls.steps if bisect_left(starts, step.start) < bisect_left(starts, step.end)]
    if wanted == "all" or (wanted is None and not steps):
        return None, steps
    if wanted is None:
        return steps[-1], steps
    for step in steps:
        if step.number == wanted:
            return step, steps
    numbers = ", ".join(str(step.number) for step in steps) or "none, so leave it out"
    raise UsageError(f"{path} has no step {wanted!r}. Its steps: {numbers}.")


def _in_step(span: DeviceSpan, owner: Call | None, calls: Calls, step: Step) -> bool:
    """By the time of the launch: the device runs behind the CPU, often beyond the end of the step."""
    return step.start <= launched_at(span, calls, owner) < step.end


def _long_lists(
    calls: Sequence[Call], spans: Sequence[tuple[DeviceSpan, Call | None]], everything: Calls
) -> dict[int, LongLists]:
    """What is known of lists that the profiler left out, by the identity of the call."""
    wanted = {
        id(call): call for call in calls if call.span.name == _GATHER or has_long_lists(call.operator, call.arguments)
    }
    launches: dict[int, list[Launch]] = {}
    for span, owner in spans if wanted else ():
        if id(owner) in wanted:
            launches.setdefault(id(owner), []).append(Launch(span.name, span.blocks))
    steps = [call.span.start for call in everything.calls if call.phase == "optimizer"] if wanted else []
    found = {}
    for number, call in wanted.items():
        if call.span.name == _GATHER or call.operator is None:
            known = least_gathered(call.arguments, launches.get(number, ()))
            if known is not None:
                found[number] = known
            continue
        gradients = _gradients_before(call.span.start, everything, steps) if call.phase == "optimizer" else ()
        known = long_lists(call.operator, call.arguments, launches.get(number, ()), gradients)
        if known is not None:
            found[number] = known
    return found


def _gradients_before(time: float, calls: Calls, steps: Sequence[float]) -> list[Seen]:
    """What the backward passes added since the op of an optimizer before them, whose ops start at `steps`."""
    last = bisect_left(calls.gradients, time, key=lambda item: item[0])
    if not last:
        return []
    earlier = bisect_left(steps, calls.gradients[last - 1][0])
    first = bisect_left(calls.gradients, steps[earlier - 1], key=lambda item: item[0]) if earlier else 0
    return [seen for _, seen in calls.gradients[first:last]]


def _window(
    calls: Sequence[Call], spans: Sequence[tuple[DeviceSpan, Call | None]], step: Step | None
) -> tuple[float, float]:
    """Where the time of what was read begins, in microseconds, and how many seconds it lasts."""
    starts = [span.start for span, _ in spans]
    ends = [span.end for span, _ in spans]
    device = max(ends) - min(starts) if spans else 0.0
    if step is not None:
        return step.start, max(step.end - step.start, device) / 1e6
    if not calls:
        return (min(starts) if starts else 0.0), device / 1e6
    first = min(call.span.start for call in calls)
    return first, (max([call.span.end for call in calls] + ends) - first) / 1e6
