"""A GPU as a measuring instrument: events, a spin that occupies it, and the eviction of its cache.

The spin is a kernel of one thread that counts clock cycles. It is bounded, so that code which synchronizes inside a
timed region is slow but never deadlocks, as it would behind a barrier that the host releases.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from nearpeak.devices.backends import gpu_backend, require_gpu_backend
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Cache

SETTLE_SECONDS = 10e-6
"""Pause between eviction and call: the memory system drains, and what precedes every call is the same kernel."""

EVICT_FACTOR = 2.0
"""How many times the cache is swept before a cold call."""

LONGEST_SPIN_SECONDS = 0.25


class GpuInstrument:
    """One GPU with its events, its sweep buffer and its clock rate; `gpu_instrument(index)` makes one per process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.backend = require_gpu_backend()
        self.device = self.backend.device(index)
        self.properties = self.backend.properties(index)
        self.name = self.properties.name
        self.cache_bytes = int(self.properties.cache_bytes or 0)
        self.conditions = self.backend.conditions(index)
        self.sweep_bytes = int(EVICT_FACTOR * self.cache_bytes)
        self._sweep: torch.Tensor | None = None
        self._sink = torch.zeros((), device=self.device)
        self._events: list[Any] = []
        self.cycles_per_second = self._measure_spin()

    def spin(self, seconds: float) -> None:
        """Enqueues a kernel that keeps the device busy for about this long and draws little power."""
        self.backend.delay(max(1, int(seconds * self.cycles_per_second)))

    def evict(self) -> None:
        """Enqueues a read of twice the cache size, which evicts everything else.

        Reading leaves clean lines. A flush that writes leaves the cache full of dirty ones, and their write-back is
        then paid by the timed kernel: 20 % of a 33-million-element add on an H200.
        """
        if self._sweep is None:
            self._sweep = torch.randn(max(4, self.sweep_bytes) // 4, device=self.device)
        torch.sum(self._sweep, dim=0, out=self._sink)

    def sweep(self, factor: float = EVICT_FACTOR) -> None:
        """Sets how many times the cache is swept. The self-test breaks the eviction with it."""
        self.sweep_bytes = int(factor * self.cache_bytes)
        self._sweep = None

    def events(self, count: int) -> Sequence[Any]:
        """At least `count` timing events, reused between blocks: creating one costs more than recording it."""
        while len(self._events) < count:
            event = self.backend.event()
            event.record()  # the driver creates it at its first use
            self._events.append(event)
        return self._events[:count]

    def synchronize(self) -> None:
        """Waits for everything on this device."""
        self.backend.synchronize(self.index)

    def recover_from_capture(self) -> None:
        """Repairs torch after a failed capture: its random generator refuses every draw until a capture succeeds."""
        self.synchronize()
        self.backend.capture(self._sink.zero_)

    def event_tick(self) -> float:
        """The smallest step between event times, in seconds."""
        events = self.events(64)
        self.spin(1e-3)
        for event in events:
            event.record()
        self.synchronize()
        first = events[0]
        times = sorted({round(first.elapsed_time(event) * 1e6) for event in events[1:]})  # nanoseconds
        steps = [b - a for a, b in itertools.pairwise(times) if b > a]
        return math.gcd(*steps) * 1e-9 if steps else float("nan")

    def event_pair_seconds(self) -> float:
        """The time between two events with nothing between them."""
        events = self.events(40)
        self.spin(1e-3)
        for event in events:
            event.record()
        self.synchronize()
        return median([float(a.elapsed_time(b)) * 1e-3 for a, b in zip(events[::2], events[1::2], strict=True)])

    def _measure_spin(self) -> float:
        events = self.events(2)
        self.backend.delay(1_000_000)
        cycles = 4_000_000
        events[0].record()
        self.backend.delay(cycles)
        events[1].record()
        self.synchronize()
        return cycles / (float(events[0].elapsed_time(events[1])) * 1e-3)


@lru_cache(maxsize=16)
def gpu_instrument(index: int) -> GpuInstrument:
    """The instrument for GPU `index`, made once per process."""
    with require_gpu_backend().selected(index):
        return GpuInstrument(index)


def current_gpu() -> GpuInstrument | None:
    """The instrument for torch's current GPU; None where torch can use none."""
    backend = gpu_backend()
    return None if backend is None else gpu_instrument(backend.current())


class Stage:
    """What runs before every timed call, outside of the timed region: reset, idling, eviction, settling.

    `pace_seconds` of idling in proportion to the call's own time keep the duty cycle of a burst low and the clocks up.
    """

    def __init__(
        self,
        device: GpuInstrument,
        cache: Cache,
        *,
        reset: Callable[[], Any] | None = None,
        pace_seconds: float = 0.0,
        evict: bool = True,
    ) -> None:
        self.device = device
        self.cold = cache == "cold" and evict
        self.reset = reset
        self.pace_seconds = pace_seconds

    def __call__(self) -> None:
        """Enqueues all of them."""
        if self.reset is not None:
            self.reset()
        if self.pace_seconds > 0:
            self.device.spin(self.pace_seconds)
        if self.cold:
            self.device.evict()
        self.device.spin(SETTLE_SECONDS)


def host_seconds(action: Callable[[], Any]) -> float:
    """Host time until `action` returns."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
