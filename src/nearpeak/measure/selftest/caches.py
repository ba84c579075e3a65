"""Is a cold cache cold? A copy against the memory's bandwidth, and an eviction that is broken on purpose."""

from __future__ import annotations

import time

import torch

from nearpeak.measure import host, instrument
from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.host import UNKNOWN_CACHE_BYTES, HostEviction
from nearpeak.measure.selftest.bench_place import Place
from nearpeak.measure.selftest.report import Experiment
from nearpeak.measure.timing import Timing
from nearpeak.units import percent, quantity


def copy(place: Place, quick: bool) -> Experiment:
    """A large copy by the harness and by a plain loop on the host's clock."""
    cache = place.cuda.cache_bytes if place.cuda is not None else HostEviction().cache_bytes or UNKNOWN_CACHE_BYTES
    size = int(max(4 * cache, 2**30 if place.cuda is not None else 2**27))
    source = torch.randn(size // 4, device=place.device)
    target = torch.empty_like(source)
    timing = bench(Case(torch.Tensor.copy_, target, source, name="copy"), max_seconds=1.0)
    rate = 2 * size / timing.seconds
    loops = 20 if place.cuda is None else 100
    best = 0.0
    for _ in range(3):
        if place.cuda is not None:
            place.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(loops):
            target.copy_(source)
        if place.cuda is not None:
            place.cuda.synchronize()
        best = max(best, 2 * size * loops / (time.perf_counter() - start))
    off = rate / best - 1
    return Experiment(
        name="copy",
        question="does a large copy reach the bandwidth that a plain loop reaches?",
        expected="within 5 % (within 15 % on a CPU, whose memory is shared)",
        found=f"{quantity(rate, 'B/s')}, the loop {quantity(best, 'B/s')} ({percent(off, 1)})",
        passed=abs(off) <= (0.05 if place.cuda is not None else 0.15),
        data={"bytes": size, "harness": rate, "loop": best},
    )


def eviction(place: Place, quick: bool) -> Experiment:
    """Small data, hot and cold; then with an eviction that sweeps a sixteenth of the cache, which must be flagged."""
    size = (
        place.cuda.cache_bytes if place.cuda is not None else HostEviction().cache_bytes or UNKNOWN_CACHE_BYTES
    ) // 16
    data = torch.randn(int(size) // 4, device=place.device)
    case = Case(torch.neg, data, name="negate")
    hot = bench(case, cache="hot", max_seconds=0.5)
    cold = bench(case, cache="cold", max_seconds=0.5)
    broken = _bench_with_broken_eviction(place, case)
    flagged = "CACHE_NOT_COLD" in {flag.name for flag in broken.flags}
    clean = "CACHE_NOT_COLD" not in {flag.name for flag in cold.flags}
    ratio = cold.seconds / hot.seconds
    found = f"cold takes {ratio:.2f} x hot; " + (
        "the broken eviction was flagged" if flagged else "the broken eviction was NOT flagged"
    )
    return Experiment(
        name="eviction",
        question="is cold slower than hot, and a broken eviction noticed?",
        expected="cold above 1.1 x hot, flag CACHE_NOT_COLD only when broken",
        found=found if clean else found + "; the sound eviction was flagged too",
        passed=ratio > 1.1 and flagged and clean,
        data={"hot": hot.seconds, "cold": cold.seconds, "broken": broken.seconds},
    )


def _bench_with_broken_eviction(place: Place, case: Case) -> Timing:
    if place.cuda is not None:
        place.cuda.sweep(1 / 16)
        try:
            return bench(case, cache="cold", max_seconds=0.3)
        finally:
            place.cuda.sweep()
    sound = host.EVICT_FACTOR
    host.EVICT_FACTOR = 1 / 64
    instrument.host_eviction_ratio.cache_clear()
    try:
        return bench(case, cache="cold", max_seconds=0.3)
    finally:
        host.EVICT_FACTOR = sound
        instrument.host_eviction_ratio.cache_clear()
