"""Marker kernels: launches that nearpeak plants in a recording, so that it can tell whether the recording lost any.

A profiler that runs out of buffers drops events and says nothing. So a kernel that does nothing is launched before the
first step, between steps and after the last one, on each stream that the program has used (`MarkerPlanter`), inside a
range that has its number. `find_markers` takes them out of what was recorded again. A marker that is gone, or is not
where it was planted, tells that more may be gone (`marker_losses`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak.devices.backends import gpu_in_use
from nearpeak.profiles.completeness import Loss
from nearpeak.trace.guard import Guard, is_capturing
from nearpeak.trace.kineto.calls import OpCalls
from nearpeak.trace.kineto.host import MARKER
from nearpeak.trace.kineto.recording import DeviceSpan, Recording
from nearpeak.trace.patches.shared_patch import patch_attribute

MOST_STREAMS = 16
"""On how many streams markers are planted."""
_CYCLES = 1


class StreamId(NamedTuple):
    """A stream as torch knows it."""

    number: int
    device: int
    kind: int

    @property
    def is_own(self) -> bool:
        """Whether torch made it, and so never destroys it: its number is 0 or odd, others are addresses."""
        return self.number == 0 or self.number % 2 == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A marker kernel that was launched."""

    number: int
    step: int
    """The number of the step that followed."""
    stream: StreamId


class MarkerPlanter:
    """Launches marker kernels, through a guard, and not while a graph is captured."""

    def __init__(self) -> None:
        self.planted: list[Marker] = []
        self._guard = Guard()
        self._streams: dict[StreamId, None] = {}

    @contextmanager
    def watch_streams(self) -> Iterator[None]:
        """Inside, streams that the program makes the current one get markers from then on."""
        original: Any = torch.cuda._set_stream_by_id

        @functools.wraps(original)
        def set_stream(stream_id: int, device_index: int, device_type: int) -> Any:
            self._use(StreamId(stream_id, device_index, device_type))
            return original(stream_id, device_index, device_type)

        with patch_attribute(torch.cuda, "_set_stream_by_id", set_stream):
            yield

    def _use(self, stream: StreamId) -> None:
        if stream.is_own and len(self._streams) < MOST_STREAMS:
            self._streams[stream] = None

    def plant(self, step: int) -> None:
        """Launches a marker on each stream, before the step of this number. On a machine without a GPU, none."""
        self._guard.call(self._plant, step)

    def _plant(self, step: int) -> None:
        backend = gpu_in_use()
        if backend is None or is_capturing():
            return
        current = torch.cuda.current_stream()
        self._use(StreamId(current.stream_id, current.device_index, current.device_type))
        with _disable_current_modes():
            for stream in tuple(self._streams):
                marker = Marker(number=len(self.planted), step=step, stream=stream)
                torch_stream = torch.cuda.Stream(
                    stream_id=stream.number, device_index=stream.device, device_type=stream.kind
                )
                with backend.on_stream(torch_stream), _RecordFunctionFast(f"{MARKER}{marker.number}"):
                    backend.delay(_CYCLES)
                self.planted.append(marker)


def find_markers(recording: Recording, calls: OpCalls) -> tuple[Recording, dict[int, DeviceSpan]]:
    """The recording without its marker kernels, and these by number."""
    markers: dict[int, DeviceSpan] = {}
    others = []
    for span in recording.device_spans:
        number = calls.marker_launches.get(span.correlation) if span.correlation is not None else None
        if number is None and span.external is not None:
            number = calls.marker_ranges.get(span.external)
        if number is None:
            others.append(span)
        else:
            markers[number] = span
    return (replace(recording, device_spans=others) if markers else recording), markers


def marker_losses(planted: Sequence[Marker], found: Mapping[int, DeviceSpan], step: int | None) -> tuple[Loss, ...]:
    """What the markers tell about the step and about the rest of the recording.

    Args:
        planted: All markers.
        found: Those that are in the recording, by number.
        step: The number of the step that was read; None for all of the recording.
    """
    gone = [marker for marker in planted if marker.number not in found]
    moved = _misplaced([marker for marker in planted if marker.number in found], found)
    losses = []
    for in_step in (True, False):
        missing, elsewhere = (
            [marker for marker in group if (step is None or marker.step in (step, step + 1)) == in_step]
            for group in (gone, moved)
        )
        where = "around the step" if in_step else "around other steps"
        streams = len({marker.stream for marker in missing})
        if missing:
            text = (
                f"{len(missing)} of {len(planted)} marker kernels that were planted in the recording are gone, on "
                f"{streams} stream{'s' * (streams != 1)} {where}: the profiler has lost events there."
            )
            losses.append(Loss(kind="markers", count=len(missing), in_step=in_step, text=text))
        if elsewhere:
            text = (
                f"{len(elsewhere)} of {len(planted)} marker kernels {where} are not where they were planted: times or "
                "streams in the recording are wrong."
            )
            losses.append(Loss(kind="markers", count=len(elsewhere), in_step=in_step, text=text))
    return tuple(losses)


def _misplaced(markers: Sequence[Marker], found: Mapping[int, DeviceSpan]) -> list[Marker]:
    """Markers that are on another stream than earlier ones of their stream, or before these."""
    last: dict[StreamId, DeviceSpan] = {}
    misplaced = []
    for marker in sorted(markers, key=lambda marker: marker.number):
        span = found[marker.number]
        before = last.setdefault(marker.stream, span)
        if (before.device, before.stream) != (span.device, span.stream) or span.start < before.start:
            misplaced.append(marker)
        else:
            last[marker.stream] = span
    return misplaced
