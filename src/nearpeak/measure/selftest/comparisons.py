"""Are differences real? The same code against itself, under drift, at a known ratio; and the interval's coverage."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nearpeak.measure.assess import interval_of
from nearpeak.measure.bench import CHECK_EVERY, quiet_collector
from nearpeak.measure.case import Case
from nearpeak.measure.compare import CONFIDENCE, collect_pairs, judge
from nearpeak.measure.options import Options
from nearpeak.measure.result import make_timing
from nearpeak.measure.selftest.bench_place import Place
from nearpeak.measure.selftest.report import Experiment
from nearpeak.measure.statistics import median, median_interval
from nearpeak.measure.subject import Subject, prepare, prepare_alike
from nearpeak.measure.timing import Block, Comparison
from nearpeak.units import percent

MARGIN = 0.01
FALSE_VERDICTS = 0.05
TICK_NANOSECONDS = 32
"""The step of a GPU's global timer (seen on an H200): a spin ends on one, so a true ratio is known to one."""
DRIFT_SHARE = 0.04
DRIFT_SECONDS = 1.7
"""The injected drift: 4 % up and down in so many seconds, about the length of a sequential comparison."""


def same(place: Place, quick: bool) -> Experiment:
    """The same code on both sides: any FASTER or SLOWER is false."""
    per_case = 8 if quick else 80
    results: dict[str, dict[str, int]] = {}
    for case in _ordinary_cases(place):
        results[case.name] = _verdicts(_compare_many(place, case, case, per_case))
    return _false_verdicts("same", "is the same code called different?", results)


def drift(place: Place, quick: bool) -> Experiment:
    """The same while the device gets slower and faster; beside it, what measuring one after the other would say."""
    question = "is the same code called different while the machine drifts?"
    if place.spin is None:
        expected = f"at most {percent(FALSE_VERDICTS, 0)} false verdicts"
        return Experiment(name="drift", question=question, expected=expected, found="needs triton", passed=None)
    case = place.spin_case(_drifting(200_000), name="spin under drift")
    comparisons = 40 if quick else 400
    results = {case.name: _verdicts(_compare_many(place, case, case, comparisons))}
    rounds = 10 if quick else 60
    false = _sequential(place, case, rounds)
    experiment = _false_verdicts("drift", question, results)
    found = f"{experiment.found}; one after the other: {percent(false / rounds, 0)} of {rounds}"
    return Experiment(
        name=experiment.name,
        question=question,
        expected=experiment.expected,
        found=found,
        passed=experiment.passed,
        data={**experiment.data, "sequential_false": false, "sequential_rounds": rounds},
    )


def ratio(place: Place, quick: bool) -> Experiment:
    """A known ratio: no bias, and the interval holds it as often as it says."""
    question = "is a known ratio found, and its interval honest?"
    expected = "bias below 0.1 %, interval right in at least 90 %, 5 % always seen"
    if place.spin is None:
        return Experiment(name="ratio", question=question, expected=expected, found="needs triton", passed=None)
    runs = 5 if quick else 25
    base = 6400 * TICK_NANOSECONDS
    offset = 300 if place.cuda is not None else 0  # nanoseconds that a kernel takes on top of its spin
    known_to = TICK_NANOSECONDS / base
    rows = []
    for change in (0.002, 0.005, 0.01, 0.02, 0.05):
        longer = round(base * (1 + change) / TICK_NANOSECONDS) * TICK_NANOSECONDS
        true = (longer + offset) / (base + offset)
        results = _compare_many(place, place.spin_case(base, "a"), place.spin_case(longer, "b"), runs)
        rows.append(
            {
                "true": true,
                "found": median([result.ratio for result in results]),
                "covered": sum(result.low - known_to <= true <= result.high + known_to for result in results),
                "seen": sum(result.low > 1 for result in results),
                "slower": sum(result.verdict == "SLOWER" for result in results),
                "runs": runs,
                "detectable": median([result.detectable for result in results]),
            }
        )
    bias = max(abs(row["found"] / row["true"] - 1) for row in rows)
    covered = sum(row["covered"] for row in rows) / (runs * len(rows))
    largest = rows[-1]["slower"] / runs
    found = (
        f"bias {percent(bias, 3)}, interval right in {percent(covered, 0)}, 5 % called SLOWER in {percent(largest, 0)}"
    )
    passed = bias < 0.001 and covered >= 0.9 and largest == 1
    return Experiment(
        name="ratio", question=question, expected=expected, found=found, passed=passed, data={"rows": rows}
    )


def coverage(place: Place, quick: bool) -> Experiment:
    """How often the printed interval holds the long-run median, in order of time and in random order."""
    options = Options(cache="hot", precision=0.002)
    case = _ordinary_cases(place)[0]
    total = 300 if quick else 1500
    subject = prepare(case, options)
    with quiet_collector():
        for _ in range(10):
            subject.sampler.block()
        blocks = [subject.sampler.block() for _ in range(total)]
    long_run = median([block.seconds for block in blocks])
    in_order = _covered(blocks, long_run, options)
    shuffled = list(blocks)
    rates = []
    for seed in range(5 if quick else 20):
        random.Random(seed).shuffle(shuffled)
        rates.append(_covered(shuffled, long_run, options))
    independent = sum(rates) / len(rates)
    found = f"{percent(independent, 1)} of independent blocks, {percent(in_order, 1)} in order of time"
    return Experiment(
        name="coverage",
        question="how often does the 95 % interval hold the long-run median?",
        expected="at least 93 % of independent blocks; in order of time, as printed",
        found=found,
        passed=independent >= 0.93,
        data={"independent": independent, "in_order": in_order, "blocks": total},
    )


def _covered(blocks: Sequence[Block], truth: float, options: Options) -> float:
    """The share of runs, each stopped by bench's own rule, whose interval holds the truth."""
    hits = runs = start = 0
    while start + options.min_blocks <= len(blocks):
        size = options.min_blocks
        while True:
            middle, interval = interval_of(blocks[start : start + size], options)
            size += CHECK_EVERY
            if interval.half_width(middle) <= options.precision or size >= 60 or start + size > len(blocks):
                break
        interval = interval_of(blocks[start : start + size], options)[1]
        hits += interval.low <= truth <= interval.high
        runs += 1
        start += size
    return hits / runs


def _ordinary_cases(place: Place) -> list[Case]:
    """Five kinds of work: small and large pointwise, a reduction, a product, a chain of small operations."""
    scale = 16 if place.cuda is not None else 1
    device = place.device
    small = torch.randn(2**14 * scale, device=device)
    large = torch.randn(2**18 * scale, device=device)
    square = torch.randn(96 * scale, 96 * scale, device=device)

    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + 1) * 2

    return [
        Case(torch.sin, small, name="sine, small"),
        Case(torch.neg, large, name="negate, large"),
        Case(torch.sum, large, name="sum"),
        Case(torch.mm, square, square, name="product"),
        Case(chain, small, name="chain"),
    ]


def _options(place: Place) -> Options:
    return Options(
        cache="cold" if place.cuda is not None else "hot",
        max_seconds=0.2,
        warmup_seconds=0.0,
        precision=MARGIN / 3,
        max_blocks=60,
        confidence=CONFIDENCE,
    )


def _compare_many(place: Place, a: Case, b: Case, count: int) -> list[Comparison]:
    """Comparisons with the default rules, on subjects that are prepared once."""
    options = _options(place)
    subjects = prepare_alike(a, b, options)
    results = []
    with quiet_collector():
        for subject in subjects:
            for _ in range(5):
                subject.sampler.block()
        for seed in range(count):
            results.append(_compare_once(subjects, options, seed))
    return results


def _compare_once(subjects: tuple[Subject, Subject], options: Options, seed: int) -> Comparison:
    series, interrupted = collect_pairs(subjects, replace(options, seed=seed), lambda line: None)
    if interrupted:
        raise KeyboardInterrupt
    timings = [make_timing(subject, series[i], options, []) for i, subject in enumerate(subjects)]
    return judge(timings[0], timings[1], margin=MARGIN, confidence=options.confidence)


def _verdicts(results: list[Comparison]) -> dict[str, int]:
    counts = {"FASTER": 0, "SLOWER": 0, "EQUIVALENT": 0, "INCONCLUSIVE": 0}
    for result in results:
        counts[result.verdict] += 1
    return counts


def _false_verdicts(name: str, question: str, results: dict[str, dict[str, int]]) -> Experiment:
    total = sum(sum(counts.values()) for counts in results.values())
    false = sum(counts["FASTER"] + counts["SLOWER"] for counts in results.values())
    equivalent = sum(counts["EQUIVALENT"] for counts in results.values())
    return Experiment(
        name=name,
        question=question,
        expected=f"at most {percent(FALSE_VERDICTS, 0)} false verdicts",
        found=f"{false} false in {total} ({percent(false / total, 1)}), {percent(equivalent / total, 0)} equivalent",
        passed=false <= FALSE_VERDICTS * total,
        data={"cases": results, "false": false, "total": total},
    )


def _sequential(place: Place, case: Case, rounds: int) -> int:
    """What the naive design says: all of one, then all of the other, different if the intervals do not touch."""
    options = _options(place)
    subject = prepare(case, options)
    false = 0
    with quiet_collector():
        for _ in range(rounds):
            series = [[subject.sampler.block().seconds for _ in range(20)] for _ in range(2)]
            first, second = (median_interval(values) for values in series)
            false += first.high < second.low or second.high < first.low
    return false


def _drifting(nanoseconds: int) -> Callable[[], int]:
    start = time.perf_counter()

    def now() -> int:
        phase = 2 * math.pi * (time.perf_counter() - start) / DRIFT_SECONDS
        return round(nanoseconds * (1 + DRIFT_SHARE * math.sin(phase)))

    return now
