"""Zeroed counters by which the programs of one launch know which of them is the last.

All counters are 0 before a launch and after it: the last program to count sets its counter back. So they are cleared
once, and not by a launch before each launch. Launches that may run at the same time have counters of their own. The
launches of one stream follow each other and share theirs; so do the replays of one CUDA graph, where each recorded
launch keeps its counters for the life of the process.
"""

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
"""Counters that are cleared at a time: enough for a thousand launches recorded in graphs."""
_SPACING = 32
"""Counters between those of two launches, so that each launch has cache lines of its own."""


def grid_counters(number: int, device: torch.device) -> Tensor:
    """At least this many int32 counters, all 0, for a launch on the current stream that leaves them at 0."""
    counters: Tensor | None
    if device.type != "cuda":
        counters = _device_counters(device).for_stream(0, number)
    elif torch._C._cuda_isCurrentStreamCapturing():
        counters = _device_counters(device).for_graph(number)
    else:
        counters = _device_counters(device).for_stream(torch._C._cuda_getCurrentRawStream(device.index), number)
    if counters is None:
        counters = torch.zeros(number, dtype=torch.int32, device=device)  # cleared by each replay
    recording = active_recording()
    if recording is not None:
        recording.add_shared_tensor(counters, functools.partial(grid_counters, number, device))
    return counters


@triton.jit
def is_last_program(counter, programs):
    """Whether all other programs have called this. If so, loads after it see everything that they stored before."""
    tl.debug_barrier()  # the stores of all threads of this program come before it counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


@functools.cache
def _device_counters(device: torch.device) -> _DeviceCounters:
    return _DeviceCounters(device)


class _DeviceCounters:
    """The counters of one device, handed out from chunks of zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, Tensor] = {}
        self._chunk = torch.empty(0, dtype=torch.int32)
        self._left = 0

    def for_stream(self, stream: int, number: int) -> Tensor:
        """The counters of a stream, the same at every call."""
        counters = self._by_stream.get(stream)
        if counters is None or len(counters) < number:
            with self._lock:
                # the smaller ones that a stream had before are not reused: launches with them may be in flight
                counters = self._by_stream[stream] = self._allocate(max(next_power_of_2(number), 1024))
                if self._left < _CHUNK // 2:  # nothing can be cleared while a graph is recorded
                    self._clear(_CHUNK)
        return counters

    def for_graph(self, number: int) -> Tensor | None:
        """Counters that are never handed out again; None if too few are left."""
        with self._lock:
            return self._allocate(number) if number <= self._left else None

    def _allocate(self, number: int) -> Tensor:
        number = triton.cdiv(number, _SPACING) * _SPACING
        if number > self._left:
            self._clear(max(number, _CHUNK))
        first = len(self._chunk) - self._left
        self._left -= number
        return self._chunk[first : first + number]

    def _clear(self, number: int) -> None:
        # in a thread of its own, which allocates from the common pool whatever pool this thread uses: memory of a graph
        # must not outlive it
        with ThreadPoolExecutor(1) as thread:
            self._chunk = thread.submit(_zeros, number, self._device).result()
        self._left = number


def _zeros(number: int, device: torch.device) -> Tensor:
    zeros = torch.zeros(number, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # all streams use them
    return zeros
