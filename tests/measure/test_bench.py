import contextlib
import dataclasses
import gc
import itertools
import math
import random
import statistics
import types

import pytest
import torch

from nearpeak.errors import CaseError, UntrustworthyMeasurement, UsageError
from nearpeak.machines.machine import Achievable, LaunchCost, Machine
from nearpeak.measure import bench as module
from nearpeak.measure.bench import (
    CHECK_EVERY,
    bench,
    call_quantiles,
    case_bound,
    explain,
    make_timing,
    quiet_collector,
    warm_up,
)
from nearpeak.measure.case import Case
from nearpeak.measure.options import Options
from nearpeak.measure.prepared import PreparedCase, Probe, rotating
from nearpeak.measure.quality import interval_of
from nearpeak.measure.timing import Block, Conditions
from nearpeak.ops.work import Work

PROBE = Probe(call_seconds=1e-3, enqueue_seconds=1e-3, memory_growth=0.0, mutated=(), nonfinite=False)
QUICK = {"cache": "hot", "max_seconds": 0.05, "warmup_seconds": 0}
X = torch.randn(64)


class Clock:
    """The harness's clock: every block takes `block_seconds` of it, nothing else does."""

    def __init__(self):
        self.now = 0.0
        self.block_seconds = 0.01

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class FakeSampler:
    """A block per value; the values may come from a generator, and a value that is an exception is raised."""

    kind, method, calls = "cpu", "made up", 1

    def __init__(self, values, clock=None):
        self.values, self.clock, self.blocks = iter(values), clock, 0

    def block(self):
        value = next(self.values)
        if isinstance(value, BaseException):
            raise value
        self.blocks += 1
        if self.clock is not None:
            self.clock.now += self.clock.block_seconds
        return Block(seconds=value, readings=(value,))


def fake_subject(values, clock=None, case=None):
    return PreparedCase(
        case=case or Case(len, X, name="made up"),
        probe=PROBE,
        sampler=FakeSampler(values, clock),
        device=None,
        conditions=types.SimpleNamespace(read=Conditions),
    )


@pytest.fixture
def measure(monkeypatch, clock):
    """bench() on made-up block times, without a warm-up."""

    def measure(values, **options):
        subject = fake_subject(values, clock)
        monkeypatch.setattr(module, "prepare", lambda case, options: subject)
        monkeypatch.setattr(module, "warm_up", lambda subject, options: None)
        monkeypatch.setattr(module, "quiet_collector", contextlib.nullcontext)  # no garbage is in made-up times
        return bench(subject.case, **options)

    return measure


def noise(sigma, seed=0):
    source = random.Random(seed)
    return (source.lognormvariate(math.log(1e-3), sigma) for _ in itertools.count())


def names(timing):
    return {flag.name for flag in timing.flags}


def test_a_steady_series_stops_as_soon_as_it_may_and_takes_fresh_blocks(measure):
    timing = measure(itertools.repeat(1e-3), min_blocks=12)
    assert len(timing.blocks) == 12 + CHECK_EVERY
    assert (timing.seconds, timing.low, timing.high) == (1e-3, 1e-3, 1e-3)
    assert timing.flags == ()
    assert (timing.grade, timing.partial) == ("A", False)


def test_the_least_number_of_blocks_is_kept(measure):
    assert len(measure(itertools.repeat(1e-3), min_blocks=40, max_seconds=10.0).blocks) == 40 + CHECK_EVERY


def test_a_noisy_series_goes_on_until_the_interval_is_narrow(measure):
    timing = measure(noise(0.02), precision=0.005, max_seconds=100.0)
    assert len(timing.blocks) > 30
    assert "PRECISION_NOT_REACHED" not in names(timing)
    before_the_fresh_ones = timing.blocks[:-CHECK_EVERY]
    middle, interval = interval_of(before_the_fresh_ones, Options())
    assert interval.half_width(middle) <= 0.005
    middle, interval = interval_of(timing.blocks[: -2 * CHECK_EVERY], Options())
    assert interval.half_width(middle) > 0.005  # it did not go on for longer than needed


@pytest.mark.slow
def test_more_precision_takes_more_blocks(measure):
    counts = [len(measure(noise(0.02), precision=p, max_seconds=100.0).blocks) for p in (0.02, 0.01, 0.005)]
    assert counts == sorted(set(counts))


def test_the_time_limit_ends_it_and_is_said(measure):
    timing = measure(noise(0.2), precision=1e-4, max_seconds=0.5)
    assert len(timing.blocks) == 50  # of 10 ms each
    assert "PRECISION_NOT_REACHED" in names(timing)
    (flag,) = (flag for flag in timing.flags if flag.name == "PRECISION_NOT_REACHED")
    assert "0.01 % was asked (50 blocks)" in flag.evidence


def test_the_limit_on_blocks_ends_it_and_is_said(measure):
    timing = measure(noise(0.2), precision=1e-4, max_seconds=100.0, max_blocks=30)
    assert len(timing.blocks) == 30
    assert "PRECISION_NOT_REACHED" in names(timing)


@pytest.mark.slow
def test_long_blocks_may_overrun_the_time_but_not_without_end(measure, clock):
    clock.block_seconds = 0.2
    timing = measure(noise(0.2), precision=1e-4, max_seconds=1.0, min_blocks=12)
    assert len(timing.blocks) == 12
    clock.block_seconds = 1.0
    timing = measure(noise(0.2), precision=1e-4, max_seconds=1.0, min_blocks=12)
    assert len(timing.blocks) == 5
    assert "PRECISION_NOT_REACHED" in names(timing)


def test_too_few_blocks_are_never_called_precise(measure, clock):
    clock.block_seconds = 10.0
    timing = measure(itertools.repeat(1e-3), max_seconds=1.0)
    assert len(timing.blocks) < 6
    assert timing.confidence < 0.95
    assert "PRECISION_NOT_REACHED" in names(timing)


def test_no_value_is_removed(measure):
    values = [1e-3] * 11 + [1.0] + [1e-3] * 100
    timing = measure(values)
    assert max(block.seconds for block in timing.blocks) == 1.0
    assert timing.seconds == 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "precision"), [(0.01, 0.005), (0.03, 0.01)])
def test_the_final_interval_holds_the_truth_as_often_as_it_says(sigma, precision):
    options, runs, truth = Options(precision=precision, max_seconds=1e9), 400, 1e-3
    covered, lengths = 0, set()
    for seed in range(runs):
        blocks, converged, interrupted = module._collect(fake_subject(noise(sigma, seed)), options, lambda line: None)
        assert converged
        assert not interrupted
        interval = interval_of(blocks, options)[1]
        covered += interval.low <= truth <= interval.high
        lengths.add(len(blocks))
    assert len(lengths) > 5  # the rule stops early and late
    assert covered / runs >= 0.93


def test_ctrl_c_leaves_what_was_measured(measure):
    timing = measure([*[1e-3, 2e-3, 3e-3] * 3, KeyboardInterrupt()])
    assert timing.partial
    assert len(timing.blocks) == 9
    assert timing.seconds == 2e-3
    (flag,) = (flag for flag in timing.flags if flag.name == "PARTIAL")
    assert flag.evidence == "stopped by hand after 9 blocks"


def test_ctrl_c_after_one_block_claims_no_confidence(measure):
    timing = measure([1e-3, KeyboardInterrupt()])
    assert timing.partial
    assert timing.confidence == 0
    assert timing.grade != "A"


def test_ctrl_c_among_the_fresh_blocks_keeps_them_all(measure):
    timing = measure([*[1e-3] * 12, 1e-3, KeyboardInterrupt()], min_blocks=12)
    assert timing.partial
    assert len(timing.blocks) == 13


def test_ctrl_c_before_any_block_goes_on_up(measure):
    with pytest.raises(KeyboardInterrupt):
        measure([KeyboardInterrupt()])


def test_a_case_that_raises_while_it_is_timed_gives_no_number(measure):
    with pytest.raises(CaseError, match="made up raised an error while it was timed: ValueError: late") as caught:
        measure([1e-3] * 8 + [ValueError("late")])
    assert isinstance(caught.value.__cause__, ValueError)


def test_strict_raises_with_the_reasons(measure):
    # Two doubts: it climbs, and the interval is wide.
    climbing = [1e-3 * (1 + 0.01 * i) for i in range(100)]
    with pytest.raises(UntrustworthyMeasurement) as caught:
        measure(climbing, strict=True, max_seconds=0.5, precision=1e-4)
    message = str(caught.value)
    assert message.startswith("made up: grade C.\n")
    assert "DRIFT: " in message
    assert "PRECISION_NOT_REACHED: half the interval is" in message
    assert "Give it more time with max_seconds" in message


def test_strict_lets_a_good_measurement_and_one_doubt_pass(measure):
    assert measure(itertools.repeat(1e-3), strict=True).grade == "A"
    assert measure(noise(0.05), strict=True, precision=1e-4, max_seconds=0.5).grade == "B"


def warmed(values, clock, **options):
    subject = fake_subject(values, clock)
    warm_up(subject, Options(**options))
    return subject.sampler.blocks


def test_the_warm_up_lasts_as_long_as_asked(clock):
    assert warmed(itertools.repeat(1e-3), clock, warmup_seconds=0.5) == 50


def test_the_warm_up_goes_on_while_it_gets_faster(clock):
    clock.block_seconds = 0.02
    settling = itertools.chain((0.9**i for i in range(35)), itertools.repeat(0.9**35))
    assert 35 < warmed(settling, clock, warmup_seconds=0.5) < 45  # 25 blocks are what was asked for


def test_the_warm_up_ends_even_if_it_never_settles(clock):
    assert warmed((0.9**i for i in itertools.count()), clock, warmup_seconds=0.1) == 18  # 8 and 100 per second
    clock.now, clock.block_seconds = 0.0, 1.0
    assert warmed((0.9**i for i in itertools.count()), clock, warmup_seconds=1.0) == 3


def test_a_sustained_regime_warms_up_for_longer(clock):
    assert warmed(itertools.repeat(1e-3), clock, warmup_seconds=0.0, regime="sustained") == 200


def test_a_warm_up_that_raises_is_reported(monkeypatch, clock):
    subject = fake_subject([1e-3, ValueError("cold feet")], clock)
    monkeypatch.setattr(module, "prepare", lambda case, options: subject)
    with pytest.raises(CaseError, match="made up raised an error while warming up: ValueError: cold feet"):
        bench(subject.case)


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_quiet_and_comes_back_as_it_was(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError), quiet_collector():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


MACHINE = Machine(
    id="made-up",
    name="Made-up",
    kind="cpu",
    vendor="",
    architecture="",
    processors=1,
    memory_bytes=1.0,
    achievable=Achievable(how="measured", note="", bandwidth=1e9, matrix={}, vector={"float32": 1e9}),
)


def timed(seconds, work, machine=MACHINE, other=None, kind="cpu", **options):
    subject = fake_subject([], case=Case(len, X, work=work))
    subject.sampler.kind = kind
    subject.other_seconds.update(other or {})
    blocks = [Block(seconds=seconds, readings=(seconds,)) for _ in range(12)]
    return make_timing(subject, blocks, Options(**options), [], limit=case_bound(subject, machine))


def test_stated_work_gives_a_bound():
    timing = timed(4e-3, Work(bytes_read=2e6))
    assert timing.bound_seconds == pytest.approx(2e-3)
    assert timing.bound_limiter == "memory"
    assert timing.bound_ceilings == "measured"
    assert timing.share_of_bound == pytest.approx(0.5)
    assert timing.flags == ()


def test_without_stated_work_there_is_no_bound():
    timing = timed(4e-3, None)
    assert (timing.bound_seconds, timing.bound_limiter, timing.share_of_bound) == (None, None, None)


def test_faster_than_the_machine_can_be_is_wrong():
    timing = timed(1e-3, Work(bytes_read=2e6))
    assert names(timing) == {"ABOVE_ROOFLINE"}
    assert timing.grade == "F"


@pytest.mark.parametrize("why", ["within 3 %", "cache hot", "derated", "launch"])
def test_what_may_be_faster_than_the_bound_is_not_accused(why):
    work, seconds, machine, cache = Work(bytes_read=2e6), 1e-3, MACHINE, "cold"
    if why == "within 3 %":
        seconds = 1.95e-3
    if why == "cache hot":
        cache = "hot"
    if why == "derated":
        machine = with_achievable(how="derated")
    if why == "launch":
        machine, work = with_achievable(launch=LaunchCost(host_call=5e-3)), Work(bytes_read=2e6)
    assert timed(seconds, work, machine, cache=cache).flags == ()


def with_achievable(**fields):
    return dataclasses.replace(MACHINE, achievable=dataclasses.replace(MACHINE.achievable, **fields))


@pytest.mark.parametrize(
    ("kind", "enqueue", "cpu_bound"),
    [
        ("device", 2e-3, True),
        ("device", 1.05e-3, False),
        ("graph", 2e-3, True),
        ("cpu", 2e-3, None),
        ("device", None, None),
    ],
)
def test_a_host_that_cannot_keep_up_is_named(kind, enqueue, cpu_bound):
    timing = timed(1e-3, None, kind=kind, other={} if enqueue is None else {"enqueue": enqueue})
    assert timing.cpu_bound is cpu_bound
    assert ("CPU_BOUND" in names(timing)) is bool(cpu_bound)
    if cpu_bound:
        assert timing.flags[0].evidence == (
            "the host needs 2.00 ms to enqueue what the device does in 1.00 ms: the device idles 50 % of the time"
        )


def test_an_explanation_names_the_doubts_and_not_the_notes():
    timing = timed(1e-3, Work(bytes_read=2e6), kind="device", other={"enqueue": 2e-3})
    assert names(timing) == {"CPU_BOUND", "ABOVE_ROOFLINE"}
    assert explain(timing).startswith(
        "len: grade F.\n  ABOVE_ROOFLINE: 1.00 ms measured, 2.00 ms is the memory bound. Check"
    )
    assert "CPU_BOUND" not in explain(timing)


def test_constant_data_is_flagged():
    subject = fake_subject([], case=Case(len, torch.zeros(2, 2048)))
    timing = make_timing(subject, [Block(seconds=1.0, readings=(1.0,))] * 12, Options(), [])
    (flag,) = timing.flags
    assert flag.name == "DEGENERATE_INPUT"
    assert flag.evidence.startswith("float32 2x2048: all")


def test_a_real_measurement_on_this_cpu():
    lines = []
    timing = bench(torch.softmax, torch.randn(64, 64), -1, name="mine", progress=lines.append, **QUICK)
    assert timing.name == "mine"
    assert timing.kind == "cpu"
    assert timing.method.startswith("host clock around a loop of ")
    assert timing.cache == "hot"
    assert 0 < timing.low <= timing.seconds <= timing.high
    assert timing.seconds == statistics.median(block.seconds for block in timing.blocks)
    assert timing.environment.torch == torch.__version__
    assert timing.environment.threads == torch.get_num_threads()
    assert [tensor.shape for tensor in timing.inputs] == [(64, 64)]
    assert timing.cpu_bound is None
    assert lines[0] == "mine: probing"


def test_the_call_returns_nothing_and_takes_no_tensor():
    timing = bench(lambda: None, **QUICK)
    assert timing.seconds > 0
    assert "CLOSURE_INPUTS" in names(timing)


def test_a_reset_is_called_before_every_call():
    order = []
    bench(lambda x: order.append("call"), X, reset=lambda: order.append("reset"), **QUICK)
    assert order[:2] == ["reset", "call"]
    assert order == ["reset", "call"] * (len(order) // 2)


def test_sparse_inputs_are_timed_and_not_described():
    timing = bench(torch.sparse.mm, torch.eye(64).to_sparse(), torch.randn(64, 8), **QUICK)
    assert [statistics.shape for statistics in timing.inputs] == [(64, 8)]


def test_a_kind_of_time_that_the_cpu_does_not_have_is_refused():
    with pytest.raises(UsageError, match="exp runs on the CPU, which has no graph time: use kind='cpu' or 'auto'"):
        bench(torch.exp, X, kind="graph")


def test_rotation_needs_tensors_and_not_too_many_copies():
    with pytest.raises(UsageError, match=r"has no tensor arguments to rotate: .* use evict='flush'"):
        bench(lambda: None, evict="rotate")
    with pytest.raises(UsageError, match=r"would need \d+ copies of its inputs to leave the cache: use evict='flush'"):
        bench(torch.exp, torch.randn(4), evict="rotate")


def test_rotation_calls_on_copies_in_turn():
    x, seen = torch.randn(2**16), []
    call = rotating(Case(lambda pair: seen.append(pair[0].data_ptr()), [x]), cache_bytes=2**20)
    copies = math.ceil(3 * 2**20 / (4 * 2**16)) + 1
    for _ in range(2 * copies):
        call()
    assert len(set(seen[:copies])) == copies  # none twice before all were used
    assert seen[copies:] == seen[:copies]


def test_something_that_is_no_function_is_refused():
    with pytest.raises(CaseError, match=r"bench\(torch.softmax, x, -1\), not bench\(torch.softmax\(x, -1\)\)"):
        bench(torch.exp(X))


def test_a_misspelt_option_is_refused_before_anything_runs():
    with pytest.raises(UsageError, match="Did you mean 'precision'"):
        bench(pytest.fail, "was called", precison=0.1)


def test_resampled_inputs_have_other_values_in_every_block():
    from nearpeak.measure.case import Resampled

    seen = []
    timing = bench(lambda x: seen.append(x[0].item()), Resampled(lambda seed: torch.full((3,), float(seed))), **QUICK)
    assert sorted(set(seen)) == [float(i) for i in range(len(timing.blocks) + 1)]  # the first draw was probed


def test_quantiles_are_of_single_calls_and_only_where_there_are_enough():
    singles = [
        Block(seconds=1.0, readings=tuple(float(place) for place in range(10 * start, 10 * start + 10)))
        for start in range(10)
    ]
    found = call_quantiles(singles, calls=10)
    assert found == {"p50": pytest.approx(49.5), "p90": pytest.approx(89.1), "p99": pytest.approx(98.01)}
    assert set(call_quantiles(singles[:2], calls=10)) == {"p50", "p90"}
    loops = [Block(seconds=1.0, readings=(1.0,))] * 200
    assert call_quantiles(loops, calls=50) == {}
    sums = [Block(seconds=1.0, readings=(9.0, 3.0))] * 200  # many calls against few
    assert call_quantiles(sums, calls=64) == {}
