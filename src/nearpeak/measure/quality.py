"""`quality_flags`: the checks of a finished series of blocks. Each check looks at one thing and gives its evidence."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nearpeak.measure.options import Options
from nearpeak.measure.page_faults import MANY_FAULTS
from nearpeak.measure.prepared import PreparedCase
from nearpeak.measure.samplers import EventSampler, GraphSampler, RegressionSampler
from nearpeak.measure.statistics import Interval, inflation, lag1, median, median_interval, modality, quantile, trend
from nearpeak.measure.timing import Block, Flag, make_flag
from nearpeak.units import percent, seconds

CLOCK_SPREAD = 0.02
EVENT_JITTER_SECONDS = 2e-6
"""The scatter of events (measured on an H200): two modes this close are the instrument's own."""
FULL_CLOCK = 0.98
"""A power cap at this share of the highest clock costs nothing worth a flag."""
SHARED_BLOCKS = 0.25
"""A condition that held in fewer blocks than this is not worth a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters that must not change while timing."""

    allocations: int
    compilations: int

    @staticmethod
    def now(prepared: PreparedCase) -> Counters:
        """The counters now."""
        allocations = 0
        if prepared.device is not None:
            allocations = prepared.device.backend.driver_allocations(prepared.device.index)
        return Counters(allocations=allocations, compilations=_compilations())


def interval_of(blocks: Sequence[Block], options: Options) -> tuple[float, Interval]:
    """Median and interval of the blocks' readings, widened where neighboring blocks are correlated."""
    values = [block.seconds for block in blocks]
    return median(values), median_interval(values, options.confidence, inflate=inflation(values))


def quality_flags(
    prepared: PreparedCase,
    blocks: Sequence[Block],
    options: Options,
    before: Counters,
    after: Counters,
    *,
    converged: bool,
) -> list[Flag]:
    """All flags of a finished series."""
    flags = [*prepared.flags]
    flags += _series_flags(prepared, blocks, options, converged)
    flags += _condition_flags(prepared, blocks)
    flags += _case_flags(prepared, before, after)
    return flags


def _series_flags(prepared: PreparedCase, blocks: Sequence[Block], options: Options, converged: bool) -> Iterator[Flag]:
    values = [block.seconds for block in blocks]
    readings = values
    if not isinstance(prepared.sampler, RegressionSampler):  # whose readings are two sums, not calls
        readings = [reading for block in blocks for reading in block.readings]
    jitter = EVENT_JITTER_SECONDS if isinstance(prepared.sampler, (EventSampler, GraphSampler)) else 0.0
    yield from series_flags(values, readings, options, converged=converged, jitter=jitter)
    hidden = [block.launch_hidden for block in blocks if block.launch_hidden is not None]
    yield from launch_flags(hidden, "blocks")


def launch_flags(hidden: Sequence[bool], unit: str) -> Iterator[Flag]:
    """Whether the device waited for the host, in too many blocks or calls."""
    exposed = hidden.count(False)
    if exposed > 0.1 * len(hidden):
        evidence = f"in {exposed} of {len(hidden)} {unit} the device ran dry while calls were enqueued"
        yield make_flag("LAUNCH_NOT_HIDDEN", evidence)


def series_flags(
    values: Sequence[float],
    readings: Sequence[float],
    options: Options,
    *,
    converged: bool,
    jitter: float = 0.0,
    unit: str = "block",
) -> Iterator[Flag]:
    """What is doubtful about a series of times, and about the calls that they are made of."""
    middle = median(values)
    interval = median_interval(values, options.confidence, inflate=inflation(values))
    if not converged:
        half = interval.half_width(middle)
        evidence = f"half the interval is {percent(half, 2)} of the median, {percent(options.precision, 2)} was asked"
        yield make_flag("PRECISION_NOT_REACHED", f"{evidence} ({len(values)} {unit}s)")
    drift = trend(values)
    if drift.p_value < 0.01 and abs(drift.change) > max(0.01, 2 * options.precision):
        evidence = f"{percent(drift.change, 1)} from the first to the last {unit} (p = {drift.p_value:.1e}"
        yield make_flag("DRIFT", f"{evidence}, neighbors correlate by {lag1(values):.2f})")
    humps = modality(readings)
    if len(readings) >= 40 and humps > 2.8 and quantile(readings, 0.9) > 1.05 * quantile(readings, 0.1) + jitter:
        evidence = f"m-value {humps:.1f} over {len(readings)} readings, 10 % to 90 %: "
        spread = f"{seconds(quantile(readings, 0.1))} to {seconds(quantile(readings, 0.9))}"
        yield make_flag("MULTIMODAL", evidence + spread)
    slowest, usual = quantile(readings, 0.99), median(readings)
    if len(readings) >= 40 and slowest > 1.5 * usual + jitter:
        # a call that takes no longer than to read the clock has a median of 0
        took = f"{seconds(slowest)}, and the median nothing"
        if usual > 0.0:
            took = f"{slowest / usual:.1f} times the median"
        yield make_flag("HEAVY_TAIL", f"the slowest hundredth takes {took}")


THROTTLE_FLAGS = {
    "power cap": "POWER_CAP",
    "thermal (software)": "THERMAL",
    "thermal (hardware)": "THERMAL",
    "hardware slowdown": "HARDWARE_SLOWDOWN",
    "power brake": "HARDWARE_SLOWDOWN",
    "cpu quota": "CPU_THROTTLED",
    "cpu contended": "CPU_CONTENDED",
}


def _condition_flags(prepared: PreparedCase, blocks: Sequence[Block]) -> Iterator[Flag]:
    blocks_by_reason: dict[str, int] = {}
    fastest = prepared.device.conditions.highest_clock_hz() if prepared.device is not None else None
    for block in blocks:
        clock = block.conditions.clock_hz
        at_full_clock = fastest is not None and clock is not None and clock >= FULL_CLOCK * fastest
        for reason in block.conditions.throttle:
            if not at_full_clock:
                blocks_by_reason[reason] = blocks_by_reason.get(reason, 0) + 1
    for reason, count in blocks_by_reason.items():
        if count >= SHARED_BLOCKS * len(blocks):
            yield make_flag(THROTTLE_FLAGS[reason], f"{reason} in {count} of {len(blocks)} blocks")
    clocks = [block.conditions.clock_hz for block in blocks if block.conditions.clock_hz]
    if len(clocks) >= 6:
        low, high = quantile(clocks, 0.1), quantile(clocks, 0.9)
        if high - low > CLOCK_SPREAD * high:
            yield make_flag("CLOCK_VARIED", f"10 % to 90 % of the blocks: {low / 1e6:.0f} to {high / 1e6:.0f} MHz")
    if prepared.device is not None:
        processes = prepared.device.conditions.processes()
        if processes is not None and processes > 1:
            yield make_flag("GPU_SHARED", f"{processes} processes hold compute contexts")


def _case_flags(prepared: PreparedCase, before: Counters, after: Counters) -> Iterator[Flag]:
    case, probe = prepared.case, prepared.probe
    if after.allocations > before.allocations:
        evidence = f"{after.allocations - before.allocations} allocations from the driver during the timed blocks"
        yield make_flag("MEMORY_ALLOCATED", evidence)
    if after.compilations > before.compilations:
        evidence = f"compilations during the timed blocks: {after.compilations - before.compilations}"
        yield make_flag("COMPILED_DURING_TIMING", evidence)
    if probe.memory_growth > 0 and (prepared.device is not None or probe.memory_growth > 2**20):
        yield make_flag("MEMORY_GROWS", f"{probe.memory_growth / 2**20:.3g} MiB more after every call")
    if probe.page_faults >= MANY_FAULTS and probe.memory_growth == 0.0:
        faults = round(probe.page_faults)
        yield make_flag("PAGE_FAULTS", f"{faults:,} page faults in each call, before the first byte of each page")
    if probe.mutated and case.reset is None:
        places = ", ".join(str(i) for i in probe.mutated)
        yield make_flag("INPUT_MUTATED", f"the values of tensor argument {places} differ after every call")
    if probe.nonfinite:
        yield make_flag("OUTPUT_NONFINITE", "the inputs are finite, the result is not")
    if not any(True for _ in case.tensors()):
        yield make_flag("CLOSURE_INPUTS", "no tensor among the arguments")


def _compilations() -> int:
    """Frames that torch.compile has compiled so far; 0 if it was never imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters: Any = dynamo.counters
    return int(counters["frames"]["total"])
