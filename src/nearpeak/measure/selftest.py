"""The self-test: experiments with a known answer, run on the user's own machine.

Linearity (delays and sleeps of known length), host delays against device delays, cold caches and a broken eviction, the
profiler or torch's own timer as a referee, comparisons of the same code and at a known ratio, the coverage of
intervals, and broken benchmarks that must each raise their flag.
"""

from __future__ import annotations

import datetime
import importlib.util
import logging
import math
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import CaseError, UsageError, did_you_mean
from nearpeak.machines.catalogue import find
from nearpeak.measure import instrument, samplers
from nearpeak.measure.bench import CHECK_EVERY, CPU_BOUND_MARGIN, bench, make_timing, quiet_collector
from nearpeak.measure.case import Case
from nearpeak.measure.compare import CONFIDENCE, collect_pairs, judge
from nearpeak.measure.gpu import GpuInstrument, Stage, current_gpu
from nearpeak.measure.instrument import profiled_seconds
from nearpeak.measure.machine import known_machine
from nearpeak.measure.options import Options
from nearpeak.measure.prepared import IDLE_SHARE, PreparedCase, prepare, prepare_pair
from nearpeak.measure.quality import interval_of
from nearpeak.measure.results import Experiment, SelfTestReport
from nearpeak.measure.samplers import STAGE_SECONDS, UNKNOWN_CACHE_BYTES, HostEviction
from nearpeak.measure.statistics import median, median_interval
from nearpeak.measure.timing import Block, Comparison, Timing
from nearpeak.ops.work import Work
from nearpeak.units import percent, quantity, seconds

LENGTHS = (2e-6, 5e-6, 10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3)
HOST_DELAYS = (50e-6, 200e-6, 1e-3, 4e-3)
DEVICE_DELAYS = (30e-6, 150e-6, 700e-6, 3e-3)
MARGIN = 0.01
FALSE_VERDICTS = 0.05
TICK_NANOSECONDS = 32
"""The step of a GPU's global timer (seen on an H200): a spin ends on one, so a true ratio is known to one."""
DRIFT_SHARE = 0.04
DRIFT_SECONDS = 1.7
"""The injected drift: 4 % up and down in so many seconds, about the length of a sequential comparison."""


@preserve_process_state()
def run(
    names: Sequence[str] = (), quick: bool = False, progress: Callable[[str], None] | None = None
) -> SelfTestReport:
    """Runs the named experiments, or all of them, and reports what was expected and what was found.

    `quick` takes fewer repetitions: enough to see that something is broken, too few to prove a rate of 5 %. An
    experiment that cannot run on this machine says why.
    """
    say = progress or (lambda line: None)
    for name in names:
        if name not in EXPERIMENTS:
            raise UsageError(f"There is no experiment {name!r}. {did_you_mean(name, EXPERIMENTS)}")
    place = find_place()
    experiments = []
    for name in names or EXPERIMENTS:
        say(f"self-test: {name}")
        start = time.perf_counter()
        experiment = EXPERIMENTS[name](place, quick)
        experiments.append(replace(experiment, seconds=time.perf_counter() - start))
        say(f"self-test: {name}: {experiment.found}")
    return SelfTestReport(
        device=place.name,
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        quick=quick,
        experiments=tuple(experiments),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device under test."""

    gpu: GpuInstrument | None
    spin: Callable[[int], None] | None
    """Occupies the device for a number of nanoseconds; None where that is not possible exactly."""

    @property
    def name(self) -> str:
        """For reports."""
        return self.gpu.name if self.gpu is not None else "cpu"

    @property
    def device(self) -> torch.device:
        """The torch device of the tensors."""
        return self.gpu.device if self.gpu is not None else torch.device("cpu")

    def spin_case(self, nanoseconds: Callable[[], int] | int, name: str = "spin") -> Case:
        """A case that spins; a callable gives the duration of each call, which is how drifts are injected."""
        assert self.spin is not None
        spin = self.spin
        anchor = torch.zeros(1, device=self.device)  # tells the harness which device the case runs on

        def call(anchor: torch.Tensor) -> None:
            spin(nanoseconds() if callable(nanoseconds) else nanoseconds)

        return Case(call, anchor, name=name)


def find_place() -> Place:
    """The GPU of this process, else its CPU."""
    gpu = current_gpu()
    if gpu is None:
        return Place(gpu=None, spin=spin_host)
    if importlib.util.find_spec("triton") is None:
        return Place(gpu=gpu, spin=None)
    from nearpeak.measure.delay_kernel import delay_kernel

    return Place(gpu=gpu, spin=delay_kernel(gpu.device))


def spin_host(nanoseconds: int) -> None:
    """Reads the host's clock until the time has passed."""
    end = time.perf_counter_ns() + nanoseconds
    while time.perf_counter_ns() < end:
        pass


def delay_linearity(place: Place, quick: bool) -> Experiment:
    """The reported time of spins of known duration, from 2 us to 20 ms."""
    question = "does the reported time grow as the true time does?"
    expected = "slope 1 within 1 % from 2 us to 20 ms"
    if place.spin is None:
        return Experiment(name="spin", question=question, expected=expected, found="needs triton", passed=None)
    rows: list[dict[str, float]] = []
    for length in LENGTHS[:: 3 if quick else 1]:
        case = place.spin_case(round(length * 1e9), name=f"spin {seconds(length)}")
        timing = bench(case, cache="hot" if place.gpu is None else "cold", max_seconds=0.3, warmup_seconds=0.05)
        rows.append({"true": length, "reported": timing.seconds, "low": timing.low, "high": timing.high})
    slope, intercept = relative_fit([row["true"] for row in rows], [row["reported"] for row in rows])
    worst = max(abs(row["reported"] - intercept - slope * row["true"]) / row["true"] for row in rows)
    found = f"slope {slope:.4f}, intercept {seconds(intercept)}, worst point off the line by {percent(worst, 2)}"
    return Experiment(
        name="spin",
        question=question,
        expected=expected,
        found=found,
        passed=abs(slope - 1) <= 0.01,
        data={"rows": rows, "slope": slope, "intercept": intercept},
    )


def relative_fit(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Slope and intercept of y = a + b x, with every point weighing by its relative error.

    >>> slope, intercept = relative_fit([1.0, 10.0, 100.0], [1.5, 10.5, 100.5])
    >>> round(slope, 6), round(intercept, 6)
    (1.0, 0.5)
    """
    weights = [1 / x**2 for x in xs]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    variance = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = covariance / variance
    return slope, mean_y - slope * mean_x


def sleep_accuracy(place: Place, quick: bool) -> Experiment:
    """A sleep on the host, compared to another clock."""
    length = 2e-3
    anchor = torch.zeros(1)

    def call(anchor: Any) -> None:
        time.sleep(length)

    timing = bench(Case(call, anchor, name="sleep"), cache="hot", max_seconds=0.5, warmup_seconds=0.02)
    count = 50 if quick else 150
    start = time.monotonic_ns()
    for _ in range(count):
        time.sleep(length)
    reference_seconds = (time.monotonic_ns() - start) / count * 1e-9
    deviation = timing.seconds / reference_seconds - 1
    return Experiment(
        name="sleep",
        question="does CPU time agree with another clock?",
        expected="at least 2 ms, and within 5 % of the monotonic clock",
        found=f"{seconds(timing.seconds)}, the other clock says {seconds(reference_seconds)} ({percent(deviation, 2)})",
        passed=timing.seconds >= length and abs(deviation) <= 0.05,
        data={"reported": timing.seconds, "independent": reference_seconds},
    )


def host_waiting(place: Place, quick: bool) -> Experiment:
    """Host delays and device spins in every combination: device time and CPU-bound verdict must both be correct."""
    question = "is CPU-bound code told apart, and its device time right all the same?"
    expected = "all verdicts right, device time within 2 % or 0.5 us"
    if place.gpu is None or place.spin is None:
        found = "needs a GPU and triton"
        return Experiment(name="waiting", question=question, expected=expected, found=found, passed=None)
    spin = place.spin
    anchor = torch.zeros(1, device=place.device)
    rows: list[dict[str, Any]] = []
    for host in HOST_DELAYS[:: 2 if quick else 1]:
        for device in DEVICE_DELAYS[:: 2 if quick else 1]:

            def call(anchor: torch.Tensor, host: float = host, device: float = device) -> None:
                spin_host(round(host * 1e9))
                spin(round(device * 1e9))

            timing = bench(Case(call, anchor, name="delay"), max_seconds=0.3, warmup_seconds=0.02)
            rows.append(
                {
                    "host": host,
                    "device": device,
                    "reported": timing.seconds,
                    "cpu_bound": timing.cpu_bound,
                    "expected": host > CPU_BOUND_MARGIN * device,
                }
            )
    correct = sum(row["cpu_bound"] == row["expected"] for row in rows)
    # An empty spin itself takes 0.6 us, as any kernel.
    deviations = [max(0.0, abs(row["reported"] - row["device"]) - 1.1e-6) / row["device"] for row in rows]
    found = f"{correct} of {len(rows)} verdicts right, device time off by at most {percent(max(deviations), 2)}"
    passed = correct == len(rows) and max(deviations) <= 0.02
    return Experiment(
        name="waiting", question=question, expected=expected, found=found, passed=passed, data={"rows": rows}
    )


def copy_bandwidth(place: Place, quick: bool) -> Experiment:
    """The bandwidth of a large copy by the harness, and by a plain loop on the host's clock."""
    cache = place.gpu.cache_bytes if place.gpu is not None else HostEviction().cache_bytes or UNKNOWN_CACHE_BYTES
    size = int(max(4 * cache, 2**30 if place.gpu is not None else 2**27))
    source = torch.randn(size // 4, device=place.device)
    target = torch.empty_like(source)
    timing = bench(Case(torch.Tensor.copy_, target, source, name="copy"), max_seconds=1.0)
    rate = 2 * size / timing.seconds
    loops = 20 if place.gpu is None else 100
    loop_rate = 0.0
    for _ in range(3):
        if place.gpu is not None:
            place.gpu.synchronize()
        start = time.perf_counter()
        for _ in range(loops):
            target.copy_(source)
        if place.gpu is not None:
            place.gpu.synchronize()
        loop_rate = max(loop_rate, 2 * size * loops / (time.perf_counter() - start))
    deviation = rate / loop_rate - 1
    return Experiment(
        name="copy",
        question="does a large copy reach the bandwidth that a plain loop reaches?",
        expected="within 5 % (within 15 % on a CPU, whose memory is shared)",
        found=f"{quantity(rate, 'B/s')}, the loop {quantity(loop_rate, 'B/s')} ({percent(deviation, 1)})",
        passed=abs(deviation) <= (0.05 if place.gpu is not None else 0.15),
        data={"bytes": size, "harness": rate, "loop": loop_rate},
    )


def cache_eviction(place: Place, quick: bool) -> Experiment:
    """Small data, hot and cold; then with an eviction that sweeps a sixteenth of the cache, which must be flagged."""
    size = (place.gpu.cache_bytes if place.gpu is not None else HostEviction().cache_bytes or UNKNOWN_CACHE_BYTES) // 16
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
    if place.gpu is not None:
        place.gpu.sweep(1 / 16)
        try:
            return bench(case, cache="cold", max_seconds=0.3)
        finally:
            place.gpu.sweep()
    sound = samplers.HOST_EVICT_FACTOR
    samplers.HOST_EVICT_FACTOR = 1 / 64
    instrument.host_eviction_ratio.cache_clear()
    try:
        return bench(case, cache="cold", max_seconds=0.3)
    finally:
        samplers.HOST_EVICT_FACTOR = sound
        instrument.host_eviction_ratio.cache_clear()


def referee_agreement(place: Place, quick: bool) -> Experiment:
    """Single-kernel operations of several sizes."""
    return _by_profiler(place, quick) if place.gpu is not None else _by_timer(place, quick)


def _by_profiler(place: Place, quick: bool) -> Experiment:
    assert place.gpu is not None
    question = "do device times agree with the profiler's kernel durations?"
    expected = "all within 3 % or 0.3 us"
    rows: list[dict[str, Any]] = []
    for case in _referee_cases(place)[:: 2 if quick else 1]:
        timing = bench(case, max_seconds=0.5)
        stage = Stage(place.gpu, "cold", pace_seconds=max(0.0, IDLE_SHARE * timing.seconds - STAGE_SECONDS))
        truth = profiled_seconds(case.call, stage, place.gpu)
        if truth is None:
            found = "the profiler sees no kernels here"
            return Experiment(name="referee", question=question, expected=expected, found=found, passed=None)
        rows.append({"name": case.name, "profiler": truth, "nearpeak": timing.seconds})
    agree = [abs(row["nearpeak"] - row["profiler"]) <= max(0.03 * row["profiler"], 0.3e-6) for row in rows]
    small = [row for row in rows if row["profiler"] < 2e-5]
    worst = max((abs(row["nearpeak"] - row["profiler"]) for row in small), default=0.0)
    found = f"{sum(agree)} of {len(rows)} agree; below 20 us off by at most {worst * 1e6:.2f} us"
    return Experiment(
        name="referee", question=question, expected=expected, found=found, passed=all(agree), data={"rows": rows}
    )


def _by_timer(place: Place, quick: bool) -> Experiment:
    import torch.utils.benchmark

    rows = []
    for case in _referee_cases(place)[:: 2 if quick else 1]:
        timing = bench(case, cache="hot", max_seconds=0.5)
        timer = torch.utils.benchmark.Timer("call()", globals={"call": case.call}, num_threads=torch.get_num_threads())
        rows.append((case.name, timer.blocked_autorange(min_run_time=0.3).median, timing.seconds))
    off = [ours / theirs - 1 for _, theirs, ours in rows]
    worst = max(off, key=abs)
    return Experiment(
        name="referee",
        question="do hot CPU times agree with torch.utils.benchmark?",
        expected="within 10 %, as both are subject to the machine's noise",
        found=f"worst of {len(rows)}: {percent(worst, 1)}",
        passed=abs(worst) <= 0.1,
        data={"rows": [list(row) for row in rows]},
    )


def _referee_cases(place: Place) -> list[Case]:
    device = place.device
    scale = 1 if place.gpu is not None else 8
    x = torch.randn(2048 // scale, 2048 // scale, device=device)
    vector = torch.randn(2**22 // scale, device=device)
    small = torch.randn(2**16, device=device)
    return [
        Case(torch.exp, small, name="exponential 64k"),
        Case(torch.softmax, x, -1, name="softmax"),
        Case(torch.add, vector, vector, name="add"),
        Case(torch.mm, x, x, name="product"),
    ]


def same_code(place: Place, quick: bool) -> Experiment:
    """The same code on both sides: any FASTER or SLOWER is false."""
    per_case = 8 if quick else 80
    results: dict[str, dict[str, int]] = {}
    for case in _ordinary_cases(place):
        results[case.name] = _verdicts(_compare_many(place, case, case, per_case))
    return _false_verdicts("same", "is the same code called different?", results)


def same_code_under_drift(place: Place, quick: bool) -> Experiment:
    """The same while the device slows down and speeds up; and the false verdicts of a sequential design."""
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


def known_ratio(place: Place, quick: bool) -> Experiment:
    """A known ratio: no bias, and the stated coverage of the interval."""
    question = "is a known ratio found, and its interval honest?"
    expected = "bias below 0.1 %, interval right in at least 90 %, 5 % always seen"
    if place.spin is None:
        return Experiment(name="ratio", question=question, expected=expected, found="needs triton", passed=None)
    runs = 5 if quick else 25
    base = 6400 * TICK_NANOSECONDS
    offset = 300 if place.gpu is not None else 0  # nanoseconds that a kernel takes on top of its spin
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


def interval_coverage(place: Place, quick: bool) -> Experiment:
    """The coverage of the reported interval for the long-run median, in order of time and in random order."""
    options = Options(cache="hot", precision=0.002)
    case = _ordinary_cases(place)[0]
    total = 300 if quick else 1500
    prepared = prepare(case, options)
    with quiet_collector():
        for _ in range(10):
            prepared.sampler.block()
        blocks = [prepared.sampler.block() for _ in range(total)]
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
    """The share of runs, each stopped by the rule of `bench`, whose interval contains the truth."""
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
    scale = 16 if place.gpu is not None else 1
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
        cache="cold" if place.gpu is not None else "hot",
        max_seconds=0.2,
        warmup_seconds=0.0,
        precision=MARGIN / 3,
        max_blocks=60,
        confidence=CONFIDENCE,
    )


def _compare_many(place: Place, a: Case, b: Case, count: int) -> list[Comparison]:
    """Comparisons with the default rules, on cases that are prepared once."""
    options = _options(place)
    pair = prepare_pair(a, b, options)
    results = []
    with quiet_collector():
        for prepared in pair:
            for _ in range(5):
                prepared.sampler.block()
        for seed in range(count):
            results.append(_compare_once(pair, options, seed))
    return results


def _compare_once(pair: tuple[PreparedCase, PreparedCase], options: Options, seed: int) -> Comparison:
    series, interrupted = collect_pairs(pair, replace(options, seed=seed), lambda line: None)
    if interrupted:
        raise KeyboardInterrupt
    timings = [make_timing(prepared, series[i], options, []) for i, prepared in enumerate(pair)]
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
    """False verdicts of a sequential design: all of one, then all of the other, judged by disjoint intervals."""
    options = _options(place)
    prepared = prepare(case, options)
    false = 0
    with quiet_collector():
        for _ in range(rounds):
            series = [[prepared.sampler.block().seconds for _ in range(20)] for _ in range(2)]
            first, second = (median_interval(values) for values in series)
            false += first.high < second.low or second.high < first.low
    return false


def _drifting(nanoseconds: int) -> Callable[[], int]:
    start = time.perf_counter()

    def now() -> int:
        phase = 2 * math.pi * (time.perf_counter() - start) / DRIFT_SECONDS
        return round(nanoseconds * (1 + DRIFT_SHARE * math.sin(phase)))

    return now


Fault = Callable[[Place], Timing]
_QUICK: dict[str, Any] = {"max_seconds": 0.3, "warmup_seconds": 0.02, "cache": "hot"}


def injected_faults(place: Place, quick: bool) -> Experiment:
    """Every fault must raise its own flag; a sound benchmark must raise none of them."""
    sound = bench(torch.exp, _data(place), **{**_QUICK, "precision": 0.05})
    without_fault = [flag.name for flag in sound.flags if flag.severity == "wrong"]
    rows: list[dict[str, Any]] = []
    for name, fault in _FAULTS.items():
        if (name in _GPU_ONLY and place.gpu is None) or (quick and name in _SLOW):
            continue
        timing = fault(place)
        flag_names = [flag.name for flag in timing.flags]
        other_flags = [flag.name for flag in timing.flags if flag.severity == "wrong" and flag.name != name]
        rows.append({"fault": name, "flags": flag_names, "raised": name in flag_names, "others": other_flags})
    rows.append({"fault": "endless memory", "flags": [], "raised": _endless_memory_is_refused(place), "others": []})
    missed = [row["fault"] for row in rows if not row["raised"]]
    wrong_flags = [f"{flag_name} for {row['fault']}" for row in rows for flag_name in row["others"]]
    found = f"{len(rows) - len(missed)} of {len(rows)} raised"
    for label, items in (
        ("missed", missed),
        ("wrong accusations", wrong_flags),
        ("raised without a fault", without_fault),
    ):
        found += f"; {label}: {', '.join(items)}" if items else ""
    return Experiment(
        name="faults",
        question="does every injected fault raise its own flag?",
        expected="all raised, no other grade-F flag",
        found=found,
        passed=not missed and not wrong_flags and not without_fault,
        data={"rows": rows},
    )


def _data(place: Place, size: int = 2**16) -> torch.Tensor:
    return torch.randn(size, device=place.device)


def _synchronizes(place: Place) -> Timing:
    return bench(lambda x: x.sum().item(), _data(place), **_QUICK)


def _side_stream(place: Place) -> Timing:
    assert place.gpu is not None
    backend = place.gpu.backend
    x, side = _data(place, 2**26), backend.new_stream()

    def call(x: torch.Tensor) -> None:
        torch.add(x, 1)
        with backend.on_stream(side):
            torch.exp(x)

    return bench(call, x, **_QUICK)


def _host_is_slow(place: Place) -> Timing:
    def call(x: torch.Tensor) -> torch.Tensor:
        spin_host(300_000)
        return torch.exp(x)

    return bench(call, _data(place), **_QUICK)


def _two_speeds(place: Place) -> Timing:
    turn = [0]
    spin = place.spin or spin_host
    anchor = torch.zeros(1, device=place.device)

    def call(anchor: torch.Tensor) -> None:
        turn[0] += 1
        spin(150_000 if turn[0] // 7 % 2 else 260_000)

    return bench(call, anchor, **{**_QUICK, "max_seconds": 1.0, "min_blocks": 60}, reset=lambda: None)


def _rare_delays(place: Place) -> Timing:
    turn = [0]
    spin = place.spin or spin_host
    anchor = torch.zeros(1, device=place.device)

    def call(anchor: torch.Tensor) -> None:
        turn[0] += 1
        spin(150_000 if turn[0] % 30 else 900_000)

    return bench(call, anchor, **{**_QUICK, "max_seconds": 1.0, "min_blocks": 40}, reset=lambda: None)


def _drifts(place: Place) -> Timing:
    start = time.perf_counter()
    spin = place.spin or spin_host
    anchor = torch.zeros(1, device=place.device)

    def call(anchor: torch.Tensor) -> None:
        spin(round(200_000 * (1 + 0.5 * (time.perf_counter() - start))))

    return bench(call, anchor, **{**_QUICK, "max_seconds": 1.0, "precision": 0.0001})


def _grows(place: Place) -> Timing:
    leaked: list[torch.Tensor] = []
    return bench(
        lambda x: leaked.append(torch.ones(2**20, device=x.device)), _data(place), **{**_QUICK, "max_seconds": 0.05}
    )


def _allocates(place: Place) -> Timing:
    assert place.gpu is not None
    backend = place.gpu.backend

    def call(x: torch.Tensor) -> torch.Tensor:
        backend.release_cached_memory()
        return torch.exp(x)

    # A result so large that no cached segment can hold it.
    return bench(call, _data(place, 2**28), **{**_QUICK, "kind": "latency"})


def _maps_anew(place: Place) -> Timing:
    def call(x: torch.Tensor) -> None:
        with mmap.mmap(-1, 2**22) as memory:
            memory[:: mmap.PAGESIZE] = bytes(2**22 // mmap.PAGESIZE)

    return bench(call, torch.randn(16), **_QUICK)


def _compiles(place: Place) -> Timing:
    import torch._dynamo

    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    turn = [0]

    def call(x: torch.Tensor) -> Any:
        turn[0] += 1
        if turn[0] % 10 == 0:
            torch._dynamo.reset()
        return compiled(x)

    with _quiet_compiler():
        return bench(
            call, _data(place), **{**_QUICK, "kind": "auto" if place.gpu is None else "latency", "warmup_seconds": 0.0}
        )


def _zeros(place: Place) -> Timing:
    return bench(torch.exp, torch.zeros(2**16, device=place.device), **_QUICK)


def _mutates(place: Place) -> Timing:
    return bench(lambda x: x.mul_(1.0001), _data(place), **_QUICK)


def _overflows(place: Place) -> Timing:
    return bench(lambda x: torch.exp(x * 1e4), _data(place), **_QUICK)


def _impossible(place: Place) -> Timing:
    machine = known_machine(place.gpu)
    if machine is None or machine.achievable is None or machine.achievable.how != "measured":
        known = find("h200-sxm")
        assert known.achievable is not None
        machine = replace(known, achievable=replace(known.achievable, how="measured"))
    return bench(torch.exp, _data(place), work=Work(bytes_read=1e12), on=machine, **{**_QUICK, "cache": "cold"})


def _no_time(place: Place) -> Timing:
    return bench(torch.exp, _data(place), **{**_QUICK, "precision": 1e-9, "max_seconds": 0.01})


def _closure(place: Place) -> Timing:
    x = _data(place)
    return bench(lambda: torch.exp(x), **_QUICK)


def _contended(place: Place) -> Timing:
    with _other_processes("while True: pass", 2 * torch.get_num_threads()):
        return bench(torch.exp, torch.randn(2**20), **{**_QUICK, "max_seconds": 1.0})


def _shared_gpu(place: Place) -> Timing:
    program = (
        f"import torch, time; x = torch.zeros(1, device={str(place.device)!r}); print('ready', flush=True); "
        "time.sleep(60)"
    )
    with _other_processes(program, 1, wait_for_line=True):
        return bench(torch.exp, _data(place), **_QUICK)


@contextmanager
def _other_processes(program: str, count: int, wait_for_line: bool = False) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        if wait_for_line:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
        else:
            time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Silences the compiler's log of recompilations, which this fault causes."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _endless_memory_is_refused(place: Place) -> bool:
    leaked: list[torch.Tensor] = []
    size = 2**28 if place.gpu is not None else 2**26
    try:
        bench(lambda x: leaked.append(torch.ones(size, device=x.device)), _data(place), **_QUICK)
    except CaseError:
        return True
    finally:
        leaked.clear()
    return False


_FAULTS: dict[str, Fault] = {
    "SYNC_IN_REGION": _synchronizes,
    "OFF_STREAM": _side_stream,
    "CPU_BOUND": _host_is_slow,
    "MULTIMODAL": _two_speeds,
    "HEAVY_TAIL": _rare_delays,
    "DRIFT": _drifts,
    "MEMORY_GROWS": _grows,
    "MEMORY_ALLOCATED": _allocates,
    "PAGE_FAULTS": _maps_anew,
    "COMPILED_DURING_TIMING": _compiles,
    "DEGENERATE_INPUT": _zeros,
    "INPUT_MUTATED": _mutates,
    "OUTPUT_NONFINITE": _overflows,
    "ABOVE_ROOFLINE": _impossible,
    "PRECISION_NOT_REACHED": _no_time,
    "CLOSURE_INPUTS": _closure,
    "CPU_CONTENDED": _contended,
    "GPU_SHARED": _shared_gpu,
}
_GPU_ONLY = {"SYNC_IN_REGION", "OFF_STREAM", "CPU_BOUND", "MEMORY_ALLOCATED", "GPU_SHARED"}
_SLOW = {"GPU_SHARED", "CPU_CONTENDED"}
EXPERIMENTS: dict[str, Callable[[Place, bool], Experiment]] = {
    "spin": delay_linearity,
    "sleep": sleep_accuracy,
    "waiting": host_waiting,
    "copy": copy_bandwidth,
    "eviction": cache_eviction,
    "referee": referee_agreement,
    "ratio": known_ratio,
    "coverage": interval_coverage,
    "same": same_code,
    "drift": same_code_under_drift,
    "faults": injected_faults,
}
