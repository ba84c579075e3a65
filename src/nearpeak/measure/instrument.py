"""The zero of the instrument: the overhead that each method of timing adds to a kernel's own duration.

It is measured once per process, device and cache state, with the same stages and samplers as everything else, on a few
small kernels whose durations the profiler reports. Without a profiler these durations are taken as 0, `proven` is
False, and small times are flagged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from nearpeak.devices.backends import require_gpu_backend
from nearpeak.measure.gpu import GpuInstrument, Stage, gpu_instrument
from nearpeak.measure.kernel_times import busy_seconds, profile_calls
from nearpeak.measure.samplers import (
    UNKNOWN_CACHE_BYTES,
    EventSampler,
    GraphSampler,
    HostEviction,
    HostSampler,
    RegressionSampler,
    Sampler,
)
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Cache

BLOCKS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class InstrumentZero:
    """The seconds that each method adds to a kernel's own duration, and how far that differs between kernels."""

    events: float
    graph_events: float | None
    gap: float
    uncertainty: float
    graph_uncertainty: float
    proven: bool


@lru_cache(maxsize=32)
def zero_of(index: int, cache: Cache) -> InstrumentZero:
    """The zero of GPU `index` for cold or hot calls."""
    device = gpu_instrument(index)
    stage = Stage(device, cache)
    readings: dict[str, list[float]] = {"events": [], "graph_events": [], "gap": []}
    proven = True
    for call in calibration_kernels(device):
        call()
        true_seconds = profiled_seconds(call, stage, device)
        proven = proven and true_seconds is not None
        for name, sampler in _samplers(device, call, stage):
            readings[name].append(_reading(sampler) - (true_seconds or 0.0))
    in_graph = readings["graph_events"]
    return InstrumentZero(
        events=median(readings["events"]),
        graph_events=median(in_graph) if in_graph else None,
        gap=median(readings["gap"]),
        uncertainty=_half_range(readings["events"]),
        graph_uncertainty=_half_range(in_graph),
        proven=proven,
    )


def _half_range(values: list[float]) -> float:
    return max(0.1e-6, (max(values) - min(values)) / 2) if values else float("inf")


def calibration_kernels(device: GpuInstrument) -> list[Callable[[], Any]]:
    """One kernel each, of different shapes: one thread, one block, many blocks, a reduction, a matrix product."""
    place = device.device
    few, many = torch.randn(16, device=place), torch.randn(2**17, device=place)
    few_out, many_out = torch.empty_like(few), torch.empty_like(many)
    rows = torch.randn(64, 4096, device=place)
    rows_out = torch.empty(64, device=place)
    table, table_out = torch.randn(128, 1024, device=place), torch.empty(128, 1024, device=place)
    wide = torch.randn(2**18, device=place)
    wide_out = torch.empty_like(wide)
    a = torch.randn(384, 384, device=place, dtype=torch.float16)
    product = torch.empty_like(a)
    return [
        lambda: device.backend.delay(1),
        lambda: torch.add(few, few, out=few_out),
        lambda: torch.exp(many, out=many_out),
        lambda: torch.amax(rows, dim=1, out=rows_out),
        lambda: torch.mm(a, a, out=product),
        lambda: torch.neg(wide, out=wide_out),
        lambda: torch.softmax(table, -1, out=table_out),
        lambda: torch.mul(many, many, out=many_out),
    ]


def _samplers(device: GpuInstrument, call: Callable[[], Any], stage: Stage) -> list[tuple[str, Sampler]]:
    samplers: list[tuple[str, Sampler]] = [
        ("events", EventSampler(device, call, stage, call_seconds=5e-6, enqueue_seconds=10e-6)),
        ("gap", RegressionSampler(device, call, call_seconds=5e-6)),
    ]
    if can_time_in_graphs():
        samplers.append(("graph_events", GraphSampler(device, call, stage, call_seconds=5e-6)))
    return samplers


def _reading(sampler: Sampler) -> float:
    sampler.block()
    return median([sampler.block().seconds for _ in range(BLOCKS)])


@lru_cache(maxsize=1)
def can_time_in_graphs() -> bool:
    """Whether this torch can record timing events inside a CUDA graph."""
    try:
        require_gpu_backend().event(external=True)
    except TypeError:
        return False
    return True


def profiled_seconds(call: Callable[[], Any], stage: Stage, device: GpuInstrument, calls: int = 30) -> float | None:
    """The duration of the kernels of a call by the profiler, staged as in a block; None where it sees none."""
    device.spin(1e-3)
    try:
        profiled = profile_calls(call, calls, before=stage, synchronize=device.synchronize)
    except RuntimeError:  # no CUPTI, or another profiler holds it
        return None
    durations = [busy_seconds(kernels) for kernels in profiled if kernels]
    return median(durations) if durations else None


@lru_cache(maxsize=32)
def eviction_ratio(index: int, sweep_bytes: int) -> float:
    """The time of an add whose tensors fit in the cache, after an eviction, over the time when it is repeated.

    `sweep_bytes` is the size of the sweep, so that the cached result belongs to this eviction.
    """
    device = gpu_instrument(index)
    a, b, c = (torch.randn(max(24, device.cache_bytes // 24) // 4, device=device.device) for _ in range(3))
    caches: tuple[Cache, Cache] = ("cold", "hot")
    times = []
    for cache in caches:
        sampler = EventSampler(
            device,
            lambda: torch.add(a, b, out=c),
            Stage(device, cache),
            call_seconds=20e-6,
            enqueue_seconds=20e-6,
            zero_seconds=zero_of(index, cache).events,
        )
        times.append(_reading(sampler))
    return times[0] / times[1]


@lru_cache(maxsize=1)
def host_eviction_ratio() -> float:
    """The same for the CPU's last-level cache."""
    evict = HostEviction()
    data = torch.randn(int((evict.cache_bytes or UNKNOWN_CACHE_BYTES) // 8) // 4)
    cold = HostSampler(lambda: torch.sum(data), "cold", call_seconds=1e-3, evict=evict)

    def warm() -> None:
        torch.sum(data)

    hot = HostSampler(lambda: torch.sum(data), "cold", call_seconds=1e-3, evict=warm)
    return _reading(cold) / _reading(hot)
