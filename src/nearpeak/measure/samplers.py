"""How a block of calls becomes a time. A sampler measures one case, one block at a time.

EventSampler       events around each call: enqueued behind a delay, or in a CUDA graph    device, graph
RegressionSampler  what one more call adds to a CUDA graph of calls, cache hot             device, graph
WallSampler        the host's clock                                                        pipelined, latency, enqueue
HostSampler        the host's clock around code that runs on the CPU                       cpu
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from nearpeak.machines.detect import detect_cpu
from nearpeak.measure.gpu import LONGEST_SPIN_SECONDS, GpuInstrument, Stage, host_seconds
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Block, Cache, Kind

BLOCK_SECONDS = 4e-3
"""Device time that a block aims at: long against clock reads and launches, short against drifts."""
STAGE_SECONDS = 50e-6
"""About what a stage takes; only for sizing blocks."""
HOT_BLOCK_SECONDS = 4e-3
COLD_CALLS = 3
HOST_EVICT_FACTOR = 2.0
"""How many times the last-level cache is swept before a cold call. The self-test changes it to break the eviction."""
UNKNOWN_CACHE_BYTES = 64 * 2**20
"""The sweep where the system does not report the size of its last-level cache; the timing is flagged."""


class Sampler(Protocol):
    """Measures one case, one block at a time."""

    kind: Kind
    method: str
    calls: int

    def block(self) -> Block:
        """Runs one block of calls and reads its time per call."""
        ...


class EventSampler:
    """Time of each call between two events, with the enqueuing hidden behind a spin and proven hidden.

    `zero_seconds` is the overhead of the pair of events around a kernel; the instrument measures it in the same process
    and under the same conditions.
    """

    kind: Kind = "device"

    def __init__(
        self,
        device: GpuInstrument,
        call: Callable[[], Any],
        stage: Stage,
        *,
        call_seconds: float,
        enqueue_seconds: float,
        zero_seconds: float = 0.0,
        calls: int | None = None,
    ) -> None:
        self.device, self.call, self.stage, self.zero_seconds = device, call, stage, zero_seconds
        unit = call_seconds + stage.pace_seconds + STAGE_SECONDS
        self.calls = calls or max(1, min(20, int(BLOCK_SECONDS / unit), int(0.05 / max(enqueue_seconds, 1e-6))))
        self.spin_seconds = min(LONGEST_SPIN_SECONDS, 2e-4 + 1.5 * self.calls * (enqueue_seconds + 60e-6))
        self.method = f"CUDA events around each call, behind a spin, less their zero of {zero_seconds * 1e6:.2f} us"

    def block(self) -> Block:
        """Enqueues all calls behind a spin. A spin that ends too early is made longer, up to a limit."""
        for _ in range(4):
            block, enqueuing = self._try_block()
            if block.launch_hidden or self.spin_seconds >= LONGEST_SPIN_SECONDS:
                break
            self.spin_seconds = min(LONGEST_SPIN_SECONDS, max(2 * self.spin_seconds, 1.5 * enqueuing))
        return block

    def _try_block(self) -> tuple[Block, float]:
        events = self.device.events(2 * self.calls + 1)
        first = events[2 * self.calls]
        self.device.spin(self.spin_seconds)
        start = time.perf_counter()
        first.record()
        for i in range(self.calls):
            self.stage()
            events[2 * i].record()
            self.call()
            events[2 * i + 1].record()
        hidden = not first.query()
        enqueuing = time.perf_counter() - start
        self.device.synchronize()
        readings = _between(events, self.calls, self.zero_seconds)
        return Block(seconds=median(readings), readings=readings, launch_hidden=hidden), enqueuing


class GraphSampler:
    """The same stages, events and calls as an `EventSampler`, captured once in a CUDA graph and replayed.

    The host launches once, so no launch needs hiding, and around one kernel the events read its duration to 0.2 us. The
    gaps between the kernels of a call are those of a graph, shorter than those of a stream: for several kernels this is
    another kind of time.
    """

    def __init__(
        self,
        device: GpuInstrument,
        call: Callable[[], Any],
        stage: Stage,
        *,
        call_seconds: float,
        zero_seconds: float = 0.0,
        kind: Literal["device", "graph"] = "graph",
        calls: int | None = None,
    ) -> None:
        self.device, self.zero_seconds = device, zero_seconds
        self.kind: Kind = kind
        unit = call_seconds + stage.pace_seconds + STAGE_SECONDS
        self.calls = calls or max(1, min(20, int(BLOCK_SECONDS / unit)))
        self.method = f"CUDA events around each call in a CUDA graph, less their zero of {zero_seconds * 1e6:.2f} us"
        self._events: list[Any] = [device.backend.event(external=True) for _ in range(2 * self.calls)]

        def staged_calls() -> None:
            for i in range(self.calls):
                stage()
                self._events[2 * i].record()
                call()
                self._events[2 * i + 1].record()

        self._graph = device.backend.capture(staged_calls)
        self._graph.replay()  # the first replay uploads the graph
        device.synchronize()

    def block(self) -> Block:
        """One replay."""
        self._graph.replay()
        self.device.synchronize()
        readings = _between(self._events, self.calls, self.zero_seconds)
        return Block(seconds=median(readings), readings=readings, launch_hidden=True)


class RegressionSampler:
    """The time that one more call adds to a CUDA graph of hot calls: a graph of many calls against one of few.

    It has no event or launch overhead and averages over hundreds of calls, which suits kernels of a few microseconds.
    The gap between two kernels of a graph, `gap_seconds`, is measured by the instrument and subtracted.
    """

    kind: Kind = "device"

    def __init__(
        self,
        device: GpuInstrument,
        call: Callable[[], Any],
        *,
        call_seconds: float,
        gap_seconds: float = 0.0,
        reset: Callable[[], Any] | None = None,
        calls: int | None = None,
        seed: int = 0,
    ) -> None:
        self.device, self.gap_seconds = device, gap_seconds
        self._random = random.Random(seed)
        self.spin_seconds = 3e-4
        self.calls = calls or max(4, min(256, int(BLOCK_SECONDS / max(call_seconds, 1e-6))))
        few = max(1, self.calls // 4)
        self.added = self.calls - few
        self.method = (
            f"regression: {self.calls} against {few} calls in a CUDA graph, less a pause of {gap_seconds * 1e6:.2f} us"
        )
        self._graphs = tuple(self._capture(call, reset, count) for count in (self.calls, few))
        for graph in self._graphs:
            graph.replay()
        device.synchronize()

    def _capture(self, call: Callable[[], Any], reset: Callable[[], Any] | None, calls: int) -> Any:
        def repeated() -> None:
            for _ in range(calls):
                if reset is not None:
                    reset()
                call()

        return self.device.backend.capture(repeated)

    def block(self) -> Block:
        """Replays both graphs in random order behind one spin, and takes the difference."""
        for _ in range(4):
            block = self._try_block()
            if block.launch_hidden:
                break
            self.spin_seconds = min(LONGEST_SPIN_SECONDS, 2 * self.spin_seconds)
        return block

    def _try_block(self) -> Block:
        events = self.device.events(4)
        order = [0, 1]
        self._random.shuffle(order)
        self.device.spin(self.spin_seconds)
        for which in order:
            events[2 * which].record()
            self._graphs[which].replay()
            events[2 * which + 1].record()
        hidden = not events[2 * order[0]].query()
        self.device.synchronize()
        many, few = _between(events, 2, 0.0)
        seconds = (many - few) / self.added - self.gap_seconds
        return Block(seconds=seconds, readings=(many, few), launch_hidden=hidden)


def _between(events: Any, pairs: int, zero: float) -> tuple[float, ...]:
    return tuple(events[2 * i].elapsed_time(events[2 * i + 1]) * 1e-3 - zero for i in range(pairs))


class WallSampler:
    """Wall time on the host's clock, for the kinds pipelined, latency and enqueue."""

    def __init__(
        self,
        device: GpuInstrument,
        call: Callable[[], Any],
        kind: Literal["pipelined", "latency", "enqueue"],
        *,
        call_seconds: float,
        reset: Callable[[], Any] | None = None,
        calls: int | None = None,
    ) -> None:
        self.device, self.call, self.reset = device, call, reset
        self.kind: Kind = kind
        # The launch queue holds about a thousand kernels; past that the host waits for the device.
        self.calls = calls or (1 if kind == "latency" else max(2, min(50, int(5e-3 / max(call_seconds, 1e-6)))))
        self.method = {
            "pipelined": f"host clock, {self.calls} calls and one synchronization",
            "latency": "host clock, device idle before and after each call",
            "enqueue": f"host clock, {self.calls} calls behind a spin",
        }[kind]

    def block(self) -> Block:
        """One block; a latency block is several calls, each with its own reading."""
        if self.kind == "latency":
            readings = tuple(self._latency() for _ in range(5))
            return Block(seconds=median(readings), readings=readings)
        self.device.synchronize()
        if self.kind == "enqueue":
            self.device.spin(2e-3)
        start = time.perf_counter()
        for _ in range(self.calls):
            if self.reset is not None:
                self.reset()
            self.call()
        if self.kind == "pipelined":
            self.device.synchronize()
        seconds = (time.perf_counter() - start) / self.calls
        self.device.synchronize()
        return Block(seconds=seconds, readings=(seconds,))

    def _latency(self) -> float:
        if self.reset is not None:
            self.reset()
        self.device.synchronize()

        def call_and_wait() -> None:
            self.call()
            self.device.synchronize()

        return host_seconds(call_and_wait)


class HostEviction:
    """Evicts the CPU's caches: reads a buffer of twice the last-level cache."""

    def __init__(self) -> None:
        self.cache_bytes = detect_cpu().cache_bytes
        self._sweep = torch.full((int(HOST_EVICT_FACTOR * (self.cache_bytes or UNKNOWN_CACHE_BYTES)) // 4,), 1.0)

    def __call__(self) -> None:
        """Reads the buffer."""
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
