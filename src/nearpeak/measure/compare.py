"""`compare`: the ratio of two times, its interval, a verdict, and the smallest detectable difference."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import UntrustworthyMeasurement, UsageError
from nearpeak.machines.machine import Machine
from nearpeak.measure.bench import case_bound, explain, make_timing, measured_block, quiet_collector, warm_up
from nearpeak.measure.case import Case, as_case, case_errors
from nearpeak.measure.options import Options, Progress, options_from
from nearpeak.measure.prepared import PreparedCase, prepare_pair
from nearpeak.measure.quality import Counters, quality_flags
from nearpeak.measure.statistics import signed_rank_center
from nearpeak.measure.timing import Block, Comparison, Verdict, make_flag
from nearpeak.units import percent

MIN_PAIRS = 20
CHECK_EVERY = 10
CONFIDENCE = 0.98
"""The confidence of a ratio's interval: the same code is called different at most once in fifty comparisons."""


@preserve_process_state()
def compare(
    a: Callable[..., Any] | Case,
    b: Callable[..., Any] | Case,
    *args: Any,
    margin: float = 0.01,
    work: Any = None,
    reset: Callable[[], Any] | None = None,
    names: tuple[str, str] = ("", ""),
    on: str | Machine | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Times `a(*args)` and `b(*args)` in interleaved pairs of blocks, in random order, and judges the ratio b / a.

    Drifts of clocks, heat and neighbors affect both alike and cancel in the ratio of each pair. Measured one after the
    other, they would look like a difference.

    The verdict is about b: FASTER or SLOWER when the interval of the ratio excludes 1 and is not within `margin`;
    EQUIVALENT when the whole interval is within `margin`; INCONCLUSIVE otherwise. `detectable` is the smallest
    difference that the run would have seen four times out of five. `on` and the options are those of `bench`, with a
    `confidence` of 0.98 by default.

    >>> import torch
    >>> result = compare(torch.sin, torch.cos, torch.randn(20_000), max_seconds=0.1, warmup_seconds=0.01)
    >>> result.low <= result.ratio <= result.high
    True
    """
    if not 0 < margin < 1:
        raise UsageError(f"margin is {margin!r}; it is a share between 0 and 1, such as 0.01 for 1 %.")
    chosen = options_from({"precision": margin / 3, "confidence": CONFIDENCE, **options})
    case_a = as_case(
        a, args if not isinstance(a, Case) else (), {}, work=work, reset=reset, name=names[0] or _name(a, "a", b)
    )
    case_b = as_case(
        b, args if not isinstance(b, Case) else (), {}, work=work, reset=reset, name=names[1] or _name(b, "b", a)
    )
    say = progress or (lambda line: None)
    say(f"probing {case_a.name} and {case_b.name}")
    pair = prepare_pair(case_a, case_b, chosen)
    kinds = tuple(prepared.sampler.kind for prepared in pair)
    if kinds[0] != kinds[1] or pair[0].device is not pair[1].device:
        raise UsageError(
            f"{case_a.name} gives a {kinds[0]} time on {pair[0].device_name}, {case_b.name} a {kinds[1]} time on "
            f"{pair[1].device_name}: these cannot be compared. Ask for one kind, for example kind='latency'."
        )
    limits = [case_bound(prepared, on) for prepared in pair]
    with quiet_collector():
        for prepared in pair:
            with case_errors(prepared.case.name, "while warming up"):
                warm_up(prepared, chosen)
        before = [Counters.now(prepared) for prepared in pair]
        series, interrupted = collect_pairs(pair, chosen, say)
        after = [Counters.now(prepared) for prepared in pair]
    timings = []
    for i, prepared in enumerate(pair):
        # The precision of a comparison is that of the ratio: a single series may drift.
        flags = quality_flags(prepared, series[i], chosen, before[i], after[i], converged=True)
        flags = [flag for flag in flags if flag.name != "DRIFT"]
        if interrupted:
            flags.append(make_flag("PARTIAL", f"stopped by hand after {len(series[i])} pairs"))
        timings.append(make_timing(prepared, series[i], chosen, flags, limit=limits[i], partial=interrupted))
    result = judge(timings[0], timings[1], margin=margin, confidence=chosen.confidence, partial=interrupted)
    if strict:
        for timing in timings:
            if timing.grade in ("C", "F"):
                raise UntrustworthyMeasurement(explain(timing))
    return result


def collect_pairs(
    pair: tuple[PreparedCase, PreparedCase], options: Options, say: Progress
) -> tuple[tuple[list[Block], list[Block]], bool]:
    """Takes pairs of neighboring blocks, each pair in random order, until the interval of the ratio is narrow."""
    order = random.Random(options.seed)
    series: tuple[list[Block], list[Block]] = ([], [])
    start = time.perf_counter()
    try:
        while len(series[1]) < options.max_blocks:
            order_of_blocks = [0, 1]
            order.shuffle(order_of_blocks)
            new_blocks: dict[int, Block] = {}
            for i in order_of_blocks:
                with case_errors(pair[i].case.name, "while it was timed"):
                    new_blocks[i] = measured_block(pair[i])
            for i in (0, 1):
                series[i].append(new_blocks[i])
            pairs, elapsed = len(series[1]), time.perf_counter() - start
            if pairs < MIN_PAIRS or (pairs % CHECK_EVERY and elapsed < options.max_seconds):
                continue
            center = signed_rank_center(_log_ratios(series), options.confidence)
            half = (center.interval.high - center.interval.low) / 2
            if half <= options.precision:
                return series, False
            say(f"{pairs} pairs, ratio {math.exp(center.value):.4f} +- {percent(half, 2)}")
            if elapsed >= options.max_seconds:
                break
    except KeyboardInterrupt:
        if len(series[1]) < 6:
            raise
        return series, True
    return series, False


def judge(a: Any, b: Any, *, margin: float, confidence: float = CONFIDENCE, partial: bool = False) -> Comparison:
    """The verdict on two timings whose blocks were taken in pairs."""
    center = signed_rank_center(_log_ratios((a.blocks, b.blocks)), confidence)
    low, high = math.exp(center.interval.low), math.exp(center.interval.high)
    half = (center.interval.high - center.interval.low) / 2
    return Comparison(
        a=a,
        b=b,
        ratio=math.exp(center.value),
        low=low,
        high=high,
        confidence=center.interval.confidence,
        verdict=verdict(low, high, margin),
        margin=margin,
        detectable=math.expm1(half * _power(confidence)),
        pairs=len(a.blocks),
        partial=partial,
    )


def _power(confidence: float) -> float:
    """The half-widths by which a difference must exceed 0 to be detected four times out of five."""
    normal = NormalDist()
    return 1 + normal.inv_cdf(0.8) / normal.inv_cdf((1 + confidence) / 2)


def verdict(low: float, high: float, margin: float) -> Verdict:
    """The verdict that the interval of the ratio allows.

    >>> verdict(0.90, 0.95, 0.01), verdict(1.02, 1.03, 0.01), verdict(0.995, 1.004, 0.01), verdict(0.97, 1.02, 0.01)
    ('FASTER', 'SLOWER', 'EQUIVALENT', 'INCONCLUSIVE')
    """
    if low >= 1 / (1 + margin) and high <= 1 + margin:
        return "EQUIVALENT"
    if high < 1:
        return "FASTER"
    if low > 1:
        return "SLOWER"
    return "INCONCLUSIVE"


def _log_ratios(series: Any) -> list[float]:
    pairs = zip(series[0], series[1], strict=True)
    return [math.log(max(b.seconds, 1e-12) / max(a.seconds, 1e-12)) for a, b in pairs]


def _name(fn: Any, letter: str, second: Any) -> str:
    first_name = fn.name if isinstance(fn, Case) else getattr(fn, "__name__", "")
    second_name = second.name if isinstance(second, Case) else getattr(second, "__name__", "")
    return f"{first_name} ({letter})" if first_name and first_name == second_name else first_name or letter
