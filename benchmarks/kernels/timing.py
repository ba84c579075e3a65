"""Times of several implementations, measured in turns, so that drift affects all of them alike.

`in_turns` measures the GPU time per call with cold caches, `host_in_turns` the host time per call. On a CPU, as in
tests, both measure wall time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from nearpeak.measure.bench import quiet_collector
from nearpeak.measure.gpu import GpuInstrument, Stage, gpu_instrument, host_seconds
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.prepared import IDLE_SHARE, LONGEST_PACE_SECONDS
from nearpeak.measure.samplers import STAGE_SECONDS, EventSampler
from nearpeak.measure.statistics import median

ROUNDS = 7
WAIT_SECONDS = 0.01
"""A call that takes so much longer behind a busy device waits for it."""
IN_A_ROW = 200
"""Calls on the host between two waits for the device: the queue of launches holds about a thousand."""
CALLS = 2000
HOPELESS = 1.5
"""A way that took so many times as long as the fastest in the first round is not measured in others."""
CLEAR, CLEAR_ROUNDS = 1.15, 2
"""Rounds end after so many if one way is compared with the others, and was so many times as fast in each."""
Way = Callable[[], Any]


class _Sampler(Protocol):
    def seconds(self) -> float:
        """The time of a call, from one block of calls."""
        ...


class _Behind:
    """Calls behind a spin that hides their launches."""

    def __init__(self, device: GpuInstrument, way: Way, reset: Way | None, enqueue_seconds: float) -> None:
        zero = zero_of(device.index, "cold").events
        rough = EventSampler(
            device,
            way,
            Stage(device, "cold", reset=reset),
            call_seconds=1e-3,
            enqueue_seconds=enqueue_seconds,
            zero_seconds=zero,
            calls=2,
        )
        estimate = max(1e-7, rough.block().seconds)
        pace = min(LONGEST_PACE_SECONDS, max(0.0, IDLE_SHARE * estimate - STAGE_SECONDS))
        self._sampler = EventSampler(
            device,
            way,
            Stage(device, "cold", reset=reset, pace_seconds=pace),
            call_seconds=estimate,
            enqueue_seconds=max(enqueue_seconds, 5e-6),
            zero_seconds=zero,
        )

    def seconds(self) -> float:
        return self._sampler.block().seconds


class _Waiting:
    """A call that waits for the device itself: between two events, and all that its user waits for counts."""

    def __init__(self, device: GpuInstrument, way: Way, reset: Way | None) -> None:
        self._device, self._way, self._stage = device, way, Stage(device, "cold", reset=reset)

    def seconds(self) -> float:
        start, end = self._device.events(2)
        self._stage()
        self._device.synchronize()
        start.record()
        self._way()
        end.record()
        self._device.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


class _Host:
    def __init__(self, way: Way, reset: Way | None) -> None:
        self._way, self._reset = way, reset

    def seconds(self) -> float:
        if self._reset is not None:
            self._reset()
        return host_seconds(self._way)


def _sampler(way: Way, reset: Way | None, may_wait: bool) -> tuple[_Sampler, bool]:
    """What measures a way, and whether that waits for the device."""
    if not torch.cuda.is_available():
        return _Host(way, reset), False
    device = gpu_instrument(torch.cuda.current_device())
    enqueue = []
    for _ in range(2):
        if reset is not None:
            reset()
        device.synchronize()
        enqueue.append(host_seconds(way))
    device.synchronize()
    if may_wait:
        if reset is not None:
            reset()
        device.synchronize()
        device.spin(2 * WAIT_SECONDS)
        # of the second call: the first may still have loaded and allocated
        waits = host_seconds(way) > enqueue[1] + WAIT_SECONDS
        device.synchronize()
        if waits:
            return _Waiting(device, way, reset), True
    return _Behind(device, way, reset, enqueue[1]), False


def in_turns(
    ways: Mapping[str, Way],
    rounds: int | None = None,
    *,
    resets: Mapping[str, Way] | None = None,
    may_wait: bool = True,
    waiting: list[str] | None = None,
    spread: dict[str, float] | None = None,
    enough: tuple[int, float] | None = None,
    compared: str | None = None,
) -> dict[str, float]:
    """The median device time of each way with cold caches, in seconds; the first of all rounds warms up.

    `resets` run before calls, outside of what is timed. `waiting` gets the names of the ways that wait for the device,
    and `spread` the median distance of the rounds of each way from their median, as a share of that. `enough`: the
    rounds after which no more are needed if the spread of every way is no larger than this. `compared`: a way of which
    it is asked how many times as fast as the others it is, which ends rounds where that is clear: see `HOPELESS`.
    """
    samplers: dict[str, _Sampler] = {}
    for name, way in ways.items():
        samplers[name], waits = _sampler(way, (resets or {}).get(name), may_wait)
        if waits and waiting is not None:
            waiting.append(name)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    measured = list(samplers)
    with quiet_collector():
        for turn in range((ROUNDS if rounds is None else rounds) + 1):
            for name in order.sample(measured, len(measured)):
                found = samplers[name].seconds()
                if turn:
                    seconds[name].append(found)
            if compared is not None and turn:
                measured = [name for name in measured if name == compared or not _is_hopeless(name, seconds)]
                if turn >= CLEAR_ROUNDS and _is_clear(compared, seconds):
                    break
            if enough is not None and turn >= enough[0] and max(map(_spread, seconds.values())) <= enough[1]:
                break
    if spread is not None:
        spread.update((name, _spread(series)) for name, series in seconds.items())
    return {name: median(series) for name, series in seconds.items()}


def _is_hopeless(name: str, seconds: Mapping[str, list[float]]) -> bool:
    return seconds[name][0] > HOPELESS * min(series[0] for series in seconds.values())


def _is_clear(compared: str, seconds: Mapping[str, list[float]]) -> bool:
    """Whether a way was much faster than each of the others, in each round that both have."""
    return all(
        other >= CLEAR * one
        for name, series in seconds.items()
        if name != compared
        for one, other in zip(seconds[compared], series, strict=False)
    )


def _spread(series: list[float]) -> float:
    middle = median(series)
    return median([abs(one - middle) for one in series]) / max(middle, 1e-12)


def host_in_turns(ways: Mapping[str, Way], calls: int | None = None) -> dict[str, float]:
    """What a call of each way takes on the host: the median of rows of calls, the device idle before each row."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    with quiet_collector():
        for turn in range(max(1, (calls or CALLS) // IN_A_ROW) + 1):
            for name in order.sample(list(ways), len(ways)):
                way = ways[name]
                _synchronize()
                start = time.perf_counter()
                for _ in range(IN_A_ROW):
                    way()
                found = (time.perf_counter() - start) / IN_A_ROW
                if turn:
                    seconds[name].append(found)
    _synchronize()
    return {name: median(series) for name, series in seconds.items()}


def extra_bytes(way: Way, reset: Way | None = None) -> int | None:
    """How much more memory a call takes at its highest than before; None where there is no GPU."""
    if not torch.cuda.is_available():
        way()
        return None
    if reset is not None:
        reset()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = way()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
