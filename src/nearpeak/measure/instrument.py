"""The instrument's own zero: what its methods read for a kernel that does nothing.

Measured once per process, device and cache state, with the same stages and the same samplers as everything else. The
empty kernel's own duration comes from the profiler; without one it is unknown and taken as zero, `proven` is False,
and small figures are flagged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from nearpeak.measure.cuda import Stage, cuda_device
from nearpeak.measure.host import UNKNOWN_CACHE_BYTES, HostEviction, HostSampler
from nearpeak.measure.profiler import busy_seconds, profile_calls
from nearpeak.measure.samplers import GraphSampler, PairSampler
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Cache

BLOCKS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """What each method adds to a kernel's own duration, and how far these readings scatter."""

    empty_kernel: float
    pair: float
    gap: float
    uncertainty: float
    proven: bool


@lru_cache(maxsize=32)
def zero_of(index: int, cache: Cache) -> Zero:
    """The zero of GPU `index` for cold or hot calls."""
    device = cuda_device(index)
    stage = Stage(device, cache)

    def empty() -> None:
        torch.cuda._sleep(1)

    duration = empty_kernel_seconds(index)
    pairs = PairSampler(device, empty, stage, call_seconds=2e-6, enqueue_seconds=10e-6)
    graph = GraphSampler(device, empty, stage, call_seconds=2e-6)
    for sampler in (pairs, graph):
        sampler.block()
    pair_blocks = [pairs.block().seconds for _ in range(BLOCKS)]
    gap_blocks = [graph.block().seconds for _ in range(BLOCKS)]
    known = duration if duration is not None else 0.0
    return Zero(
        empty_kernel=known,
        pair=median(pair_blocks) - known,
        gap=median(gap_blocks) - known,
        # Around kernels of other shapes the pair's overhead differs by up to this much (20 operations on an H200).
        uncertainty=max(0.4e-6, (max(pair_blocks) - min(pair_blocks)) / 2),
        proven=duration is not None,
    )


@lru_cache(maxsize=16)
def empty_kernel_seconds(index: int) -> float | None:
    """How long the profiler says that an empty kernel runs; None where it sees no kernel."""
    device = cuda_device(index)
    try:
        calls = profile_calls(
            lambda: torch.cuda._sleep(1), 20, before=lambda: device.spin(2e-5), synchronize=device.synchronize
        )
    except RuntimeError:  # no CUPTI, or another profiler holds it
        return None
    seen = [busy_seconds(kernels) for kernels in calls if kernels]
    return median(seen) if seen else None


@lru_cache(maxsize=32)
def eviction_ratio(index: int, sweep_bytes: int) -> float:
    """How much longer a read of a quarter of the cache takes after an eviction than when it is repeated.

    `sweep_bytes` is what the eviction sweeps, so that an answer is kept only for that eviction.
    """
    device = cuda_device(index)
    data = torch.randn(max(1, device.cache_bytes // 4) // 4, device=device.device)
    out = torch.zeros((), device=device.device)
    caches: tuple[Cache, Cache] = ("cold", "hot")
    times = []
    for cache in caches:
        sampler = PairSampler(
            device,
            lambda: torch.sum(data, dim=0, out=out),
            Stage(device, cache),
            call_seconds=20e-6,
            enqueue_seconds=20e-6,
            zero_seconds=zero_of(index, cache).pair,
        )
        sampler.block()
        times.append(median([sampler.block().seconds for _ in range(5)]))
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
    return median([cold.block().seconds for _ in range(5)]) / median([hot.block().seconds for _ in range(5)])
