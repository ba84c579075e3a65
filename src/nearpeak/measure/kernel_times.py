"""Kernel durations as torch.profiler (CUPTI) reports them.

They serve as a reference and are never the source of a reported time: the profiler changes the gaps between kernels and
slows the host down.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nearpeak.devices.backends import GPU_BACKENDS, gpu_backend

_RANGE = "nearpeak.call"
_LAUNCH_PREFIXES = tuple(prefix for backend in GPU_BACKENDS for prefix in backend.launch_prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """One kernel, copy or fill on the device."""

    name: str
    start: float
    seconds: float
    stream: int

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.seconds


def profile_calls(
    call: Callable[[], Any], calls: int, *, before: Callable[[], Any] | None = None, synchronize: Callable[[], Any]
) -> list[tuple[TimedKernel, ...]]:
    """The kernels of each of `calls` calls, in order of start. What `before` launches is left out.

    A kernel belongs to the call during which the host launched it, by the correlation id. The profiler is the one that
    `torch.profiler.profile` uses: that one imports Inductor, which takes seconds, as soon as it starts.
    """
    backend = gpu_backend()
    device = None if backend is None else backend.profiler_activity.lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's notes about its own cycles
        with torch.autograd.profiler.profile(use_cpu=True, use_device=device, use_kineto=True) as profiler:
            for _ in range(calls):
                if before is not None:
                    before()
                with torch.profiler.record_function(_RANGE):
                    call()
            synchronize()
    events = profiler.kineto_results.events()
    ranges = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() == _RANGE and not _on_device(event)
    )
    launches = {
        event.correlation_id(): event.start_ns()
        for event in events
        if not _on_device(event) and event.name().startswith(_LAUNCH_PREFIXES)
    }
    origin = min((event.start_ns() for event in events), default=0)  # seconds since 1970 lose the nanoseconds
    kernels_by_call: list[list[TimedKernel]] = [[] for _ in ranges]
    for event in events:
        launch = launches.get(event.correlation_id())
        if not _on_device(event) or launch is None or event.name() == _RANGE:
            continue
        for index, (start, end) in enumerate(ranges):
            if start <= launch <= end:
                kernel = TimedKernel(
                    name=event.name(),
                    start=(event.start_ns() - origin) * 1e-9,
                    seconds=event.duration_ns() * 1e-9,
                    stream=event.device_resource_id(),
                )
                kernels_by_call[index].append(kernel)
                break
    return [tuple(sorted(kernels, key=lambda kernel: kernel.start)) for kernels in kernels_by_call]


def busy_seconds(kernels: tuple[TimedKernel, ...]) -> float:
    """The time during which at least one kernel ran: the union of the intervals, not their sum."""
    total, reach = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, reach))
        reach = max(reach, kernel.end)
    return total


def _on_device(event: Any) -> bool:
    return "CPU" not in str(event.device_type())
