"""How a block of calls becomes a time. A sampler measures one subject, one block at a time.

    PairSampler     events around each call, the whole block enqueued behind a spin       device
    GraphSampler    what a call adds to a CUDA graph: with the calls minus without them   graph, device
    WallSampler     the host's clock: pipelined, latency or enqueue                       pipelined, latency, enqueue
    HostSampler     the host's clock around code that runs on the CPU                     cpu (in host.py)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from nearpeak.measure.cuda import LONGEST_SPIN_SECONDS, CudaDevice, Stage, host_seconds
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Block, Kind

BLOCK_SECONDS = 4e-3
"""Device time that a block aims at: long against clock reads and launches, short against drifts."""


class Sampler(Protocol):
    """Measures one subject, a block at a time."""

    kind: Kind
    method: str

    def block(self) -> Block:
        """Runs one block of calls and reads its time per call."""
        ...


class PairSampler:
    """Device time of each call between two events, with the enqueuing hidden behind a spin and proven hidden.

    `zero_seconds` is what the pair reads around an empty kernel beyond that kernel's own duration; the instrument
    measures it in the same process and in the same surroundings.
    """

    kind: Kind = "device"

    def __init__(
        self,
        device: CudaDevice,
        call: Callable[[], Any],
        stage: Stage,
        *,
        call_seconds: float,
        enqueue_seconds: float,
        zero_seconds: float = 0.0,
        calls: int | None = None,
    ) -> None:
        self.device, self.call, self.stage, self.zero_seconds = device, call, stage, zero_seconds
        unit = call_seconds + stage.pace_seconds + 40e-6
        self.calls = calls or max(1, min(20, int(BLOCK_SECONDS / unit), int(0.05 / max(enqueue_seconds, 1e-6))))
        self.spin_seconds = min(LONGEST_SPIN_SECONDS, 2e-4 + 1.5 * self.calls * (enqueue_seconds + 60e-6))
        self.method = f"CUDA events around each call, behind a spin, zero of {zero_seconds * 1e6:.2f} us removed"

    def block(self) -> Block:
        """Enqueues all calls of the block behind a spin; a spin that ended too early is made longer, then given up."""
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
        readings = tuple(
            events[2 * i].elapsed_time(events[2 * i + 1]) * 1e-3 - self.zero_seconds for i in range(self.calls)
        )
        return Block(seconds=median(readings), readings=readings, launch_hidden=hidden), enqueuing


class GraphSampler:
    """What one call adds to a CUDA graph: the same graph with and without its calls, replayed in random order.

    A cold graph holds `calls` stages, each followed by a call or by nothing. A hot graph holds calls alone, many or
    few. The difference over the number of calls is free of event and launch overhead; what remains is the pause
    between two kernels of a graph, `gap_seconds`, which the instrument measures on an empty kernel.
    """

    def __init__(
        self,
        device: CudaDevice,
        call: Callable[[], Any],
        stage: Stage,
        *,
        call_seconds: float,
        gap_seconds: float = 0.0,
        kind: Kind = "graph",
        calls: int | None = None,
        seed: int = 0,
    ) -> None:
        self.device, self.stage, self.gap_seconds, self.kind = device, stage, gap_seconds, kind
        self._random = random.Random(seed)
        unit = call_seconds + (stage.pace_seconds + 40e-6 if stage.cold else 0.0)
        most = 24 if stage.cold else 256
        self.calls = calls or max(4, min(most, int(BLOCK_SECONDS / unit)))
        few = 0 if stage.cold else max(1, self.calls // 4)
        self.added = self.calls - few
        self.with_calls = self._capture(call, self.calls)
        self.without = self._capture(call, few)
        self.method = (
            f"CUDA graph, {self.calls} against {few} calls, pause of {gap_seconds * 1e6:.2f} us per call removed"
        )
        for graph in (self.with_calls, self.without):  # the first replay uploads the graph
            graph.replay()
        device.synchronize()

    def _capture(self, call: Callable[[], Any], calls: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            if not self.stage.cold:
                self.stage()
            for i in range(self.calls if self.stage.cold else calls):
                if self.stage.cold:
                    self.stage()
                elif self.stage.reset is not None:
                    self.stage.reset()
                if i < calls:
                    call()
        return graph

    def block(self) -> Block:
        """Replays both graphs behind one spin and takes the difference."""
        events = self.device.events(4)
        order = [(self.with_calls, 0), (self.without, 2)]
        self._random.shuffle(order)
        self.device.spin(3e-4)
        for graph, position in order:
            events[position].record()
            graph.replay()
            events[position + 1].record()
        hidden = not events[order[0][1]].query()
        self.device.synchronize()
        high = events[0].elapsed_time(events[1]) * 1e-3
        low = events[2].elapsed_time(events[3]) * 1e-3
        seconds = (high - low) / self.added - self.gap_seconds
        return Block(seconds=seconds, readings=(high, low), launch_hidden=hidden)


class WallSampler:
    """Wall time on the host's clock, for the three kinds of time that the host sees."""

    def __init__(
        self,
        device: CudaDevice,
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
            "pipelined": f"host clock, {self.calls} calls and one synchronisation",
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
