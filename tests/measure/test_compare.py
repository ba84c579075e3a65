import dataclasses
import functools
import itertools
import math
import random
import types

import pytest
import torch

from nearpeak.errors import CaseError, UntrustworthyMeasurement, UsageError
from nearpeak.measure import compare as module
from nearpeak.measure.case import Case
from nearpeak.measure.compare import MIN_PAIRS, collect_pairs, compare, judge, verdict
from nearpeak.measure.options import Options
from nearpeak.measure.prepared import PreparedCase, Probe
from nearpeak.measure.statistics import median, median_interval
from nearpeak.measure.timing import Block, Conditions, make_flag

PROBE = Probe(call_seconds=1e-3, enqueue_seconds=1e-3, memory_growth=0.0, mutated=(), nonfinite=False)
OPTIONS = Options(precision=0.0033, max_seconds=1e9, max_blocks=60)
X = torch.randn(64)


class FakeSampler:
    """A block for every draw; a draw that is an exception is raised."""

    kind, method, calls = "cpu", "made up", 1

    def __init__(self, draw):
        self.draw = draw

    def block(self):
        value = self.draw()
        if isinstance(value, BaseException):
            raise value
        return Block(seconds=value, readings=(value,))


def fake_subject(draw, name="made up"):
    return PreparedCase(
        case=Case(len, X, name=name),
        probe=PROBE,
        sampler=FakeSampler(draw),
        device=None,
        conditions=types.SimpleNamespace(read=Conditions),
    )


class World:
    """A machine that drifts: whatever is timed next sees its state, and some noise of its own."""

    def __init__(self, drift, seed, noise=0.01):
        self.random = random.Random(seed)
        self.drift, self.noise = drift, noise
        self.blocks, self.phase, self.state = 0, self.random.uniform(0, 2 * math.pi), 0.0

    def slowness(self):
        self.blocks += 1
        if self.drift == "sinusoid":
            return 0.05 * math.sin(2 * math.pi * self.blocks / 37 + self.phase)
        if self.drift == "ramp":
            return 0.002 * self.blocks
        if self.drift == "autoregressive":
            self.state = 0.95 * self.state + self.random.gauss(0, 0.01)
            return self.state
        return 0.0

    def draw(self, seconds=1e-3):
        return seconds * math.exp(self.slowness()) * self.random.lognormvariate(0, self.noise)


def compared(a, b, seed=0, margin=1e-4):
    """A comparison of two draws; with so small a margin the same code is never merely EQUIVALENT."""
    options = dataclasses.replace(OPTIONS, seed=seed)
    series, interrupted = collect_pairs((fake_subject(a), fake_subject(b)), options, lambda line: None)
    assert not interrupted
    first, second = (types.SimpleNamespace(blocks=blocks) for blocks in series)
    return judge(first, second, margin=margin)


DRIFTS = ("none", "sinusoid", "ramp", "autoregressive")


@pytest.mark.slow
@pytest.mark.parametrize("drift", DRIFTS)
def test_the_same_code_is_rarely_called_different_whatever_the_machine_does(drift):
    comparisons, false = 400, 0
    for seed in range(comparisons):
        world = World(drift, 1000 + seed)
        false += compared(world.draw, world.draw, seed).verdict in ("FASTER", "SLOWER")
    allowed = 0.05 * comparisons
    assert false <= allowed + 2.5 * math.sqrt(allowed * 0.95)


@pytest.mark.parametrize("drift", DRIFTS[1:])
def test_measuring_one_after_the_other_would_call_it_different(drift):
    """The contrast: the same machines, all blocks of one and then all of the other, intervals that do not touch."""
    false = 0
    for seed in range(200):
        world = World(drift, 1000 + seed)
        first, second = (median_interval([world.draw() for _ in range(20)]) for _ in range(2))
        false += first.high < second.low or second.high < first.low
    assert false > 40


@pytest.mark.slow
@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("ratio", [0.8, 0.98, 1.005, 1.05])
def test_a_known_ratio_is_found_and_its_interval_holds_it(drift, ratio):
    results = []
    for seed in range(80):
        world = World(drift, seed)
        results.append(compared(world.draw, functools.partial(world.draw, ratio * 1e-3), seed))
    assert median([result.ratio for result in results]) == pytest.approx(ratio, rel=0.001)
    covered = sum(result.low <= ratio <= result.high for result in results)
    assert covered >= 0.95 * 80 - 3 * math.sqrt(80 * 0.95 * 0.05)
    expected = "FASTER" if ratio < 1 else "SLOWER"
    seen = sum(result.verdict == expected for result in results)
    if abs(ratio - 1) > 0.01:
        assert seen == 80
    assert not any(result.verdict in ("FASTER", "SLOWER") and result.verdict != expected for result in results)


@pytest.mark.slow
def test_what_it_says_it_could_see_it_sees_four_times_out_of_five():
    claimed = median([compared(w.draw, w.draw, i).detectable for i in range(60) for w in [World("none", i)]])
    seen = 0
    for seed in range(200):
        world = World("none", 5000 + seed)
        seen += compared(world.draw, functools.partial(world.draw, (1 + claimed) * 1e-3), seed).low > 1
    assert 0.7 < seen / 200 < 0.9


def test_more_noise_can_see_less():
    quiet, loud = (World("none", 1, noise) for noise in (0.005, 0.05))
    assert compared(quiet.draw, quiet.draw).detectable < compared(loud.draw, loud.draw).detectable


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.90, 0.95, "FASTER"),
        (1.02, 1.03, "SLOWER"),
        (0.995, 1.004, "EQUIVALENT"),
        (1.002, 1.004, "EQUIVALENT"),  # a real difference, too small to matter
        (0.97, 1.02, "INCONCLUSIVE"),
        (1.0, 1.05, "INCONCLUSIVE"),
        (0.95, 1.0, "INCONCLUSIVE"),
        (1.005, 1.02, "SLOWER"),
        (0.98, 0.995, "FASTER"),
        (1 / 1.01, 1.01, "EQUIVALENT"),
    ],
)
def test_verdicts(low, high, expected):
    assert verdict(low, high, 0.01) == expected


def test_verdicts_do_not_depend_on_which_is_called_a():
    mirror = {"FASTER": "SLOWER", "SLOWER": "FASTER"}
    source = random.Random(1)
    for _ in range(2000):
        low, high = sorted(math.exp(source.gauss(0, 0.02)) for _ in range(2))
        said = verdict(low, high, 0.01)
        assert verdict(1 / high, 1 / low, 0.01) == mirror.get(said, said)


def test_a_steady_pair_stops_as_soon_as_it_may():
    result = compared(lambda: 1e-3, lambda: 2e-3)
    assert result.pairs == MIN_PAIRS
    assert result.ratio == pytest.approx(2)
    assert result.verdict == "SLOWER"


def test_a_noisy_pair_ends_at_the_limit_of_blocks():
    world = World("none", 1, noise=0.5)
    assert compared(world.draw, world.draw).pairs == OPTIONS.max_blocks


def test_the_time_limit_ends_it_after_the_least_number_of_pairs(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    world = World("none", 1, noise=0.5)
    options = Options(max_seconds=33.0)
    series, _ = collect_pairs((fake_subject(world.draw), fake_subject(world.draw)), options, lambda line: None)
    assert len(series[0]) == len(series[1]) == 33
    ticks = itertools.count()
    options = Options(max_seconds=2.0)
    series, _ = collect_pairs((fake_subject(world.draw), fake_subject(world.draw)), options, lambda line: None)
    assert len(series[0]) == MIN_PAIRS


def test_each_pair_is_in_random_order_that_the_seed_decides():
    def order(seed):
        turns = []

        def draw(which):
            turns.append(which)
            return 1e-3

        options = Options(seed=seed)
        subjects = fake_subject(lambda: draw("a")), fake_subject(lambda: draw("b"))
        collect_pairs(subjects, options, lambda line: None)
        return ["".join(pair) for pair in zip(turns[::2], turns[1::2], strict=True)]

    assert set(order(0)) == {"ab", "ba"}
    assert order(0) == order(0)
    assert order(0) != order(1)


def test_zero_or_negative_readings_are_no_crash():
    assert compared(lambda: 0.0, lambda: 1e-3).verdict == "SLOWER"
    assert compared(lambda: -1e-9, lambda: -1e-9).ratio == 1.0


def failing_after(blocks, error):
    values = itertools.chain([1e-3] * blocks, itertools.repeat(error))
    return lambda: next(values)


def test_ctrl_c_keeps_whole_pairs():
    subjects = fake_subject(lambda: 1e-3), fake_subject(failing_after(9, KeyboardInterrupt()))
    series, interrupted = collect_pairs(subjects, Options(), lambda line: None)
    assert interrupted
    assert len(series[0]) == len(series[1]) == 9


def test_ctrl_c_before_enough_pairs_goes_on_up():
    subjects = fake_subject(lambda: 1e-3), fake_subject(failing_after(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        collect_pairs(subjects, Options(), lambda line: None)


def test_the_one_that_raises_is_named():
    subjects = fake_subject(lambda: 1e-3, "good"), fake_subject(failing_after(7, ValueError("late")), "bad")
    with pytest.raises(CaseError, match=r"^bad raised an error while it was timed: ValueError: late"):
        collect_pairs(subjects, Options(), lambda line: None)


@pytest.fixture
def fakes(monkeypatch):
    """compare() on two made-up series."""

    def fakes(a, b):
        subjects = fake_subject(a, "first"), fake_subject(b, "second")
        monkeypatch.setattr(module, "prepare_pair", lambda case_a, case_b, options: subjects)
        return subjects

    return fakes


def test_an_interrupted_comparison_is_marked(fakes):
    fakes(World("none", 1).draw, failing_after(30, KeyboardInterrupt()))
    result = compare(len, len, X, max_seconds=1e9, precision=0.0, warmup_seconds=0)
    assert result.partial
    assert {flag.name for flag in result.a.flags} == {"PARTIAL"}
    assert {flag.name for flag in result.b.flags} == {"PARTIAL"}
    assert result.pairs == len(result.a.blocks) == len(result.b.blocks)


def test_a_drift_that_both_share_is_not_flagged(fakes):
    world = World("ramp", 1)
    fakes(world.draw, world.draw)
    result = compare(len, len, X, warmup_seconds=0)
    assert "DRIFT" not in {flag.name for flag in (*result.a.flags, *result.b.flags)}
    assert result.verdict == "EQUIVALENT"


def test_strict_raises_for_the_doubtful_one(fakes):
    subjects = fakes(lambda: 1e-3, lambda: 1e-3)
    subjects[1].flags.append(make_flag("CACHE_NOT_COLD", "made up"))
    with pytest.raises(UntrustworthyMeasurement, match=r"second: grade F\.\n  CACHE_NOT_COLD: made up"):
        compare(len, len, X, strict=True, warmup_seconds=0)


def test_two_kinds_of_time_are_not_compared(fakes):
    subjects = fakes(lambda: 1e-3, lambda: 1e-3)
    subjects[1].sampler.kind = "graph"
    with pytest.raises(UsageError, match=r"gives a cpu time on cpu, .* a graph time on cpu: these cannot be compared"):
        compare(len, sum, X)


@pytest.mark.parametrize("margin", [0, 1, -0.1, 5, math.nan])
def test_a_margin_that_is_no_share_is_refused(margin):
    with pytest.raises(UsageError, match=r"margin is .*; it is a share between 0 and 1, such as 0.01 for 1 %"):
        compare(len, len, X, margin=margin)


@pytest.mark.slow
def test_two_of_one_name_are_told_apart(fakes):
    progress = []
    fakes(lambda: 1e-3, lambda: 1e-3)
    compare(torch.sin, torch.sin, X, warmup_seconds=0, progress=progress.append)
    assert progress[0] == "probing sin (a) and sin (b)"
    compare(torch.sin, torch.cos, X, names=("old", ""), warmup_seconds=0, progress=progress.append)
    assert "probing old and cos" in progress


@pytest.mark.slow
def test_a_real_comparison_on_this_cpu():
    small, large = torch.randn(2**10), torch.randn(2**16)
    result = compare(
        Case(torch.exp, small, name="small"),
        Case(torch.exp, large, name="large"),
        cache="hot",
        max_seconds=0.1,
        warmup_seconds=0,
    )
    assert result.low <= result.ratio <= result.high
    assert result.pairs >= MIN_PAIRS
    assert (result.a.name, result.b.name) == ("small", "large")
    if any(flag.name == "CPU_CONTENDED" for timing in (result.a, result.b) for flag in timing.flags):
        pytest.skip("other work shares the cores, and a call takes as long as its turns")
    assert result.verdict == "SLOWER"
    assert result.ratio > 3
    assert str(result).startswith("large is SLOWER against small: ")
