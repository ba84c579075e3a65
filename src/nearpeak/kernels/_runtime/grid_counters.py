"""Zeroed counters by which the programs of one launch know which of them is the last."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.replay import active_recording

_CHUNK = 2**18
"""Counters that are cleared at a time: of a thousand launches that graphs record."""
_SPACING = 32
"""Counters of different launches are this far from each other: on lines of the cache of their own."""


class _DeviceCounters:
    """Those of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, Tensor] = {}
        self._chunk = torch.empty(0, dtype=torch.int32)
        self._left = 0

    def of_stream(self, stream: int, number: int) -> Tensor:
        """Those of a stream, which are given out again and again."""
        found = self._by_stream.get(stream)
        if found is None or len(found) < number:
            with self._lock:
                # what a stream had before stays where it is, and is never given to others: launches may be under way
                found = self._by_stream[stream] = self._taken(max(next_power_of_2(number), 1024))
                if self._left < _CHUNK // 2:  # while a graph is recorded nothing can be cleared
                    self._clear(_CHUNK)
        return found

    def for_good(self, number: int) -> Tensor | None:
        """Some that nobody else will have; None where none are left."""
        with self._lock:
            return self._taken(number) if number <= self._left else None

    def _taken(self, number: int) -> Tensor:
        number = triton.cdiv(number, _SPACING) * _SPACING
        if number > self._left:
            self._clear(max(number, _CHUNK))
        first = len(self._chunk) - self._left
        self._left -= number
        return self._chunk[first : first + number]

    def _clear(self, number: int) -> None:
        # in a thread of its own, which allocates from the common memory, whatever this one has been told to: memory of
        # a graph must not outlive it
        with ThreadPoolExecutor(1) as other:
            self._chunk = other.submit(_zeros, number, self._device).result()
        self._left = number


def _zeros(number: int, device: torch.device) -> Tensor:
    made = torch.zeros(number, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # it is for all streams
    return made


@functools.cache
def _device_counters(device: torch.device) -> _DeviceCounters:
    return _DeviceCounters(device)


def grid_counters(number: int, device: torch.device) -> Tensor:
    """At least so many counters in int32, all 0, for a launch on the current stream that leaves them at 0."""
    if device.type != "cuda":
        found: Tensor | None = _device_counters(device).of_stream(0, number)
    elif torch._C._cuda_isCurrentStreamCapturing():
        found = _device_counters(device).for_good(number)
    else:
        found = _device_counters(device).of_stream(torch._C._cuda_getCurrentRawStream(device.index), number)
    if found is None:
        found = torch.zeros(number, dtype=torch.int32, device=device)  # cleared by each replay
    recorder = active_recording()
    if recorder is not None:
        recorder.found(found, functools.partial(grid_counters, number, device))
    return found


@triton.jit
def is_last_program(ticket, programs):
    """Whether all other programs have been here. Then all that they stored before is seen by what is loaded after."""
    tl.debug_barrier()  # what any thread of this program stored comes before its ticket
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ticket, 0)
    tl.debug_barrier()
    return last
