"""Timing code that runs on the CPU, with the same blocks and the same cache states as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from nearpeak.machines.detect import cpu_facts
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Block, Cache, Kind

HOT_BLOCK_SECONDS = 4e-3
COLD_CALLS = 3
EVICT_FACTOR = 2.0
"""How many times the last-level cache is swept before a cold call; the self-test breaks it on purpose."""
UNKNOWN_CACHE_BYTES = 64 * 2**20
"""Swept when the system does not tell the size of its last-level cache; the timing is then flagged."""


class HostEviction:
    """Sweeps a buffer of twice the last-level cache through the cores."""

    def __init__(self) -> None:
        self.cache_bytes = cpu_facts().cache_bytes
        self._sweep = torch.randn(int(EVICT_FACTOR * (self.cache_bytes or UNKNOWN_CACHE_BYTES)) // 4)

    def __call__(self) -> None:
        """Reads it all."""
        torch.sum(self._sweep)


class HostSampler:
    """Wall time of a call on the CPU: one reading per call when cold, a loop of calls when hot."""

    kind: Kind = "cpu"

    def __init__(
        self,
        call: Callable[[], Any],
        cache: Cache,
        *,
        call_seconds: float,
        reset: Callable[[], Any] | None = None,
        evict: Callable[[], Any] | None = None,
        calls: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.call, self.reset, self.clock = call, reset, clock
        self.evict = evict if cache == "cold" else None
        single = self.evict is not None or reset is not None
        fitting = max(1, min(10_000, int(HOT_BLOCK_SECONDS / max(call_seconds, 1e-7))))
        self.calls = calls or (COLD_CALLS if single else fitting)
        self.single = single
        self.zero_seconds = self._clock_seconds() if single else 0.0
        self.method = (
            f"host clock around each of {self.calls} calls"
            if single
            else f"host clock around a loop of {self.calls} calls"
        )

    def block(self) -> Block:
        """One block of calls."""
        if not self.single:
            start = self.clock()
            for _ in range(self.calls):
                self.call()
            seconds = (self.clock() - start) / self.calls
            return Block(seconds=seconds, readings=(seconds,))
        readings = tuple(self._one_call() for _ in range(self.calls))
        return Block(seconds=median(readings), readings=readings)

    def _one_call(self) -> float:
        if self.reset is not None:
            self.reset()
        if self.evict is not None:
            self.evict()
        start = self.clock()
        self.call()
        return max(0.0, self.clock() - start - self.zero_seconds)

    def _clock_seconds(self) -> float:
        readings = []
        for _ in range(50):
            start = self.clock()
            readings.append(self.clock() - start)
        return median(readings)
