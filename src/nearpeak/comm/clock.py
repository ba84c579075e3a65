"""`Clock`: times calls that all ranks of a job begin together.

All ranks meet at a barrier before each timed call. On a CPU the time of a rank is that of the host's clock around the
call. On a GPU the stream gets, in this order, a spin, an all-reduce of one element, an event, the call and an event:
the spin hides the launches, the small all-reduce lets all GPUs begin at once, and the events are read afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from nearpeak.comm.world import World
from nearpeak.measure.gpu import GpuInstrument, current_gpu
from nearpeak.measure.options import Options
from nearpeak.measure.statistics import Interval, inflation, median, median_interval

WARMUP_CALLS = 3
BLOCK_S = 0.02
"""Seconds of calls between two exchanges of times."""
MOST_CALLS_AT_ONCE = 32
SPIN_S = 300e-6
"""Time on the GPU in which the host enqueues a barrier and a call; longer from then on where it was too short."""
LONGEST_SPIN_S = 10e-3
HOST_CALLS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Calls that all ranks timed: [rank][call]."""

    by_rank: list[list[float]]
    launches_hidden: tuple[bool, ...] = ()
    """On a GPU, for each call of this rank."""

    @property
    def slowest(self) -> list[float]:
        """The slowest rank's time of each call."""
        return [max(call) for call in zip(*self.by_rank, strict=True)]

    @property
    def skews(self) -> list[float]:
        """The longest less the shortest time of each call."""
        return [max(call) - min(call) for call in zip(*self.by_rank, strict=True)]


class Clock:
    """Times calls that all ranks begin together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gpu: GpuInstrument | None = current_gpu() if world.device.type != "cpu" else None
        self._token = torch.zeros(1, device=world.device)
        self._spin_s = SPIN_S
        self.method = (
            "the host's clock around each call, after a barrier"
            if self.gpu is None
            else "CUDA events around each call, behind a spin and an all-reduce of one element"
        )

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.gpu is not None:
            self.gpu.synchronize()

    def calls(
        self, what: str, call: Callable[[], object], before: Callable[[], object], count: int, *, on_host: bool = False
    ) -> Times:
        """Times `count` calls; `before` runs before each one, outside of its time."""
        by_events = self.gpu is not None and not on_host
        read = self._event_time if by_events else self._host_time
        times, hidden = [], []
        for _ in range(count):
            with self.world.watchdog.call(what):
                taken, was_hidden = read(call, before)
            times.append(taken)
            hidden.append(was_hidden)
        by_rank = self.world.gather_times(times)
        return Times(by_rank=by_rank, launches_hidden=tuple(hidden) if by_events else ())

    def _host_time(self, call: Callable[[], object], before: Callable[[], object]) -> tuple[float, bool]:
        before()
        self.synchronize()
        self.world.barrier()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start, True

    def _event_time(self, call: Callable[[], object], before: Callable[[], object]) -> tuple[float, bool]:
        assert self.gpu is not None
        first, last = self.gpu.events(2)
        before()
        self.gpu.spin(self._spin_s)
        distributed.all_reduce(self._token)
        first.record()
        call()
        last.record()
        was_hidden = not first.query()
        if not was_hidden:
            self._spin_s = min(2 * self._spin_s, LONGEST_SPIN_S)
        self.gpu.synchronize()
        return float(first.elapsed_time(last)) * 1e-3, was_hidden

    def host_seconds(self, what: str, call: Callable[[], object], before: Callable[[], object]) -> float | None:
        """On a GPU, the slowest rank's median by the host's clock; None elsewhere, where that is the time itself."""
        if self.gpu is None:
            return None
        times = []
        for _ in range(HOST_CALLS):
            with self.world.watchdog.call(what):
                times.append(self._host_time(call, before)[0])
        return max(self.world.gather(median(times)))

    def series(
        self,
        what: str,
        call: Callable[[], object],
        before: Callable[[], object],
        options: Options,
        *,
        on_host: bool = False,
    ) -> Series:
        """Times calls until rank 0 has a narrow interval, or no time left; `on_host` by its clock also on a GPU."""
        started = time.perf_counter()
        first = self.calls(what, call, before, WARMUP_CALLS, on_host=on_host)
        count = self.world.decide(lambda: _calls_at_once(first.slowest))
        by_rank: list[list[float]] = [[] for _ in range(self.world.size)]
        hidden: list[bool] = []
        while True:
            block = self.calls(what, call, before, count, on_host=on_host)
            for series, new in zip(by_rank, block.by_rank, strict=True):
                series += new
            hidden += block.launches_hidden
            slowest = Times(by_rank=by_rank).slowest
            elapsed = time.perf_counter() - started
            state = self.world.decide(lambda: _state(slowest, elapsed, options))  # noqa: B023  # called at once
            if state != "continue":
                times = Times(by_rank=by_rank, launches_hidden=tuple(hidden))
                return Series(times=times, converged=state == "narrow")

    def in_turns(
        self, what: str, calls: Mapping[str, Callable[[], object]], before: Callable[[], object], options: Options
    ) -> dict[str, list[float]]:
        """The slowest rank's times of several calls that take turns, so that a drift affects all alike."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in calls.items():
            self.calls(f"{what}, {name}", call, before, WARMUP_CALLS)
        started = time.perf_counter()
        while True:
            for name, call in calls.items():
                times[name] += self.calls(f"{what}, {name}", call, before, 1).slowest
            first, elapsed = next(iter(times.values())), time.perf_counter() - started
            if self.world.decide(lambda: _state(first, elapsed, options)) != "continue":  # noqa: B023  # called at once
                return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All timed calls of one point."""

    times: Times
    converged: bool

    def interval(self, options: Options) -> tuple[float, Interval]:
        """Median and interval of the slowest rank's times."""
        return _interval(self.times.slowest, options)


def _calls_at_once(times: Sequence[float]) -> int:
    return max(1, min(MOST_CALLS_AT_ONCE, int(BLOCK_S / max(min(times), 1e-6))))


def _interval(values: Sequence[float], options: Options) -> tuple[float, Interval]:
    return median(values), median_interval(values, options.confidence, inflate=inflation(values))


def _state(values: Sequence[float], elapsed: float, options: Options) -> str:
    """What rank 0 decides: "continue", or why not."""
    if len(values) >= options.min_blocks:
        middle, interval = _interval(values, options)
        if interval.half_width(middle) <= options.precision:
            return "narrow"
    if len(values) >= options.max_blocks or elapsed >= options.max_seconds:
        return "time is up"
    return "continue"
