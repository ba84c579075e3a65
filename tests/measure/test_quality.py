import collections
import random
import re
import sys
import types

import pytest
import torch

from nearpeak.measure.case import Case
from nearpeak.measure.options import Options
from nearpeak.measure.prepared import PreparedCase, Probe
from nearpeak.measure.quality import Counters, interval_of, quality_flags
from nearpeak.measure.samplers import EventSampler, RegressionSampler
from nearpeak.measure.statistics import median, median_interval
from nearpeak.measure.timing import Block, Conditions, make_flag

STILL = Counters(allocations=5, compilations=3)
X = torch.randn(8)


class Device:
    """As much of a GPU as the checks ask for."""

    def __init__(self, highest=2e9, processes=1):
        self.conditions = types.SimpleNamespace(highest_clock_hz=lambda: highest, processes=lambda: processes)


def probe(**fields):
    given = {"memory_growth": 0.0, "mutated": (), "nonfinite": False, **fields}
    return Probe(call_seconds=1e-3, enqueue_seconds=1e-3, **given)


def subject(case=None, device=None, sampler=None, **probed):
    return PreparedCase(
        case=case or Case(len, X),
        probe=probe(**probed),
        sampler=sampler or types.SimpleNamespace(kind="cpu", method="made up", calls=1),
        device=device,
        conditions=types.SimpleNamespace(read=Conditions),
    )


def blocks(values, **fields):
    return [Block(seconds=value, readings=(value,), **fields) for value in values]


def noisy(n=20, sigma=0.001, seed=0):
    source = random.Random(seed)
    return [1e-3 * source.gauss(1, sigma) for _ in range(n)]


def flags(series, of=None, after=STILL, converged=True, **options):
    return {
        f.name: f for f in quality_flags(of or subject(), series, Options(**options), STILL, after, converged=converged)
    }


def sampler_of(kind):
    return object.__new__(kind)  # only its type matters here


def test_a_quiet_series_has_no_flags():
    for seed in range(50):
        assert flags(blocks(noisy(seed=seed))) == {}


def test_what_was_known_before_is_kept():
    of = subject()
    of.flags.append(make_flag("NO_GRAPH", "made up"))
    assert list(flags(blocks(noisy()), of)) == ["NO_GRAPH"]


def test_the_interval_is_widened_where_neighbors_agree():
    climbing = [1e-3 * (1 + 0.001 * i) for i in range(40)]
    middle, interval = interval_of(blocks(climbing), Options())
    assert middle == median(climbing)
    assert interval.low < median_interval(climbing).low


def test_an_interval_that_stayed_wide_is_said():
    (flag,) = flags(blocks(noisy(12, 0.1)), converged=False, precision=0.001).values()
    assert flag.name == "PRECISION_NOT_REACHED"
    assert flag.evidence.endswith("% of the median, 0.10 % was asked (12 blocks)")


@pytest.mark.parametrize("change", [0.06, -0.06])
def test_a_drift_is_flagged_with_its_size(change):
    series = [value * (1 + change * i / 29) for i, value in enumerate(noisy(30))]
    evidence = flags(blocks(series))["DRIFT"].evidence
    stated, _, rest = evidence.partition(" % from the first to the last block (p = ")
    assert float(stated) == pytest.approx(100 * change / (1 + change / 2), abs=0.2)  # a share of the median
    assert "neighbors correlate by" in rest


def test_a_drift_that_is_too_small_to_matter_is_not_flagged():
    series = [value * (1 + 0.008 * i / 29) for i, value in enumerate(noisy(30, 1e-5))]
    assert "DRIFT" not in flags(blocks(series))
    series = [value * (1 + 0.03 * i / 29) for i, value in enumerate(noisy(30, 1e-5))]
    assert "DRIFT" in flags(blocks(series))
    assert "DRIFT" not in flags(blocks(series), precision=0.02)  # less than twice what was asked


@pytest.mark.parametrize(("exposed", "flagged"), [(0, False), (2, False), (3, True), (20, True)])
def test_launches_that_were_not_hidden_are_flagged(exposed, flagged):
    values = noisy(20)
    series = blocks(values[:exposed], launch_hidden=False) + blocks(values[exposed:], launch_hidden=True)
    found = flags(series)
    assert ("LAUNCH_NOT_HIDDEN" in found) is flagged
    if flagged:
        assert f"in {exposed} of 20 blocks the device ran dry" in found["LAUNCH_NOT_HIDDEN"].evidence


def test_launches_that_nobody_watched_are_not_flagged():
    assert "LAUNCH_NOT_HIDDEN" not in flags(blocks(noisy(), launch_hidden=None))


def two_speeds(n=60, ratio=1.3):
    return [value * (ratio if i % 2 else 1) for i, value in enumerate(noisy(n, 0.01))]


def test_two_speeds_are_flagged():
    evidence = flags(blocks(two_speeds()))["MULTIMODAL"].evidence
    assert re.fullmatch(r"m-value [34]\.\d over 60 readings, 10 % to 90 %: 99\d us to 1\.3\d ms", evidence), evidence


def test_two_speeds_that_differ_by_little_are_not_flagged():
    values = [value * (1.03 if i % 2 else 1) for i, value in enumerate(noisy(60, 0.001))]
    assert "MULTIMODAL" not in flags(blocks(values))


def test_two_speeds_in_few_readings_are_not_flagged():
    assert "MULTIMODAL" not in flags(blocks(two_speeds(38)))


def test_two_speeds_among_the_calls_of_a_block_are_flagged():
    fast, slow = noisy(60, 0.01), [1.5 * value for value in noisy(60, 0.01, seed=1)]
    series = [Block(seconds=a, readings=(a, b)) for a, b in zip(fast, slow, strict=True)]
    assert "MULTIMODAL" in flags(series)


def test_the_two_sums_of_a_regression_are_not_two_speeds():
    series = [Block(seconds=value, readings=(4 * value, value)) for value in noisy(60, 0.01)]
    assert "MULTIMODAL" not in flags(series, subject(sampler=sampler_of(RegressionSampler)))


def test_two_speeds_within_the_jitter_of_events_are_not_flagged():
    values = [(10.0 if i % 2 else 9.0) * 1e-6 * value / 1e-3 for i, value in enumerate(noisy(60, 0.002))]
    assert "MULTIMODAL" in flags(blocks(values))
    assert "MULTIMODAL" not in flags(blocks(values), subject(sampler=sampler_of(EventSampler)))


def test_rare_slow_calls_are_a_note():
    values = noisy(100)
    values[20] = values[70] = 5e-3
    flag = flags(blocks(values))["HEAVY_TAIL"]
    assert flag.severity == "note"
    assert "times the median" in flag.evidence
    assert "HEAVY_TAIL" not in flags(blocks(values[:30]))  # too few to speak of a hundredth


def test_a_median_of_nothing_divides_nothing():
    values = [0.0] * 60 + [1e-6] * 3
    assert flags(blocks(values))["HEAVY_TAIL"].evidence == "the slowest hundredth takes 1.00 us, and the median nothing"


def under(values, throttled, *reasons, clock=None):
    """A series whose first `throttled` blocks ran under these reasons."""
    held, free = Conditions(clock_hz=clock, throttle=reasons), Conditions(clock_hz=clock)
    return blocks(values[:throttled], conditions=held) + blocks(values[throttled:], conditions=free)


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("power cap", "POWER_CAP"),
        ("thermal (software)", "THERMAL"),
        ("thermal (hardware)", "THERMAL"),
        ("hardware slowdown", "HARDWARE_SLOWDOWN"),
        ("power brake", "HARDWARE_SLOWDOWN"),
        ("cpu quota", "CPU_THROTTLED"),
        ("cpu contended", "CPU_CONTENDED"),
    ],
)
def test_throttling_is_flagged_by_its_reason(reason, name):
    assert flags(under(noisy(20), 5, reason))[name].evidence == f"{reason} in 5 of 20 blocks"
    assert flags(under(noisy(20), 4, reason)) == {}  # a quarter of the blocks counts, less does not


def test_every_reason_that_can_be_read_has_its_flag():
    from nearpeak.devices.nvml import _THROTTLE_REASONS

    for reason in (*_THROTTLE_REASONS.values(), "cpu quota", "cpu contended"):
        assert flags(under(noisy(20), 20, reason))


def test_a_power_cap_at_the_highest_clock_costs_nothing():
    device = Device(highest=2e9)
    assert flags(under(noisy(20), 20, "power cap", clock=1.99e9), subject(device=device)) == {}
    assert "POWER_CAP" in flags(under(noisy(20), 20, "power cap", clock=1.7e9), subject(device=device))
    unknown = Device(highest=None)
    assert "POWER_CAP" in flags(under(noisy(20), 20, "power cap", clock=1.99e9), subject(device=unknown))


def clocked(clocks):
    return [
        Block(seconds=v, readings=(v,), conditions=Conditions(clock_hz=c))
        for v, c in zip(noisy(20), clocks, strict=True)
    ]


def test_clocks_that_vary_are_flagged():
    evidence = flags(clocked([1.5e9] * 10 + [1.9e9] * 10))["CLOCK_VARIED"].evidence
    assert evidence == "10 % to 90 % of the blocks: 1500 to 1900 MHz"


@pytest.mark.parametrize(
    "clocks", [[1.9e9] * 20, [1.9e9] * 19 + [0.5e9], [None] * 20, [1e9] * 2 + [None] * 16 + [2e9] * 2]
)
def test_steady_or_unknown_clocks_are_not_flagged(clocks):
    assert "CLOCK_VARIED" not in flags(clocked(clocks))


@pytest.mark.parametrize(("processes", "flagged"), [(1, False), (0, False), (None, False), (2, True)])
def test_another_process_on_the_gpu_is_flagged(processes, flagged):
    found = flags(blocks(noisy()), subject(device=Device(processes=processes)))
    assert ("GPU_SHARED" in found) is flagged


def test_what_happened_while_timing_is_flagged():
    after = Counters(allocations=STILL.allocations + 2, compilations=STILL.compilations + 1)
    found = flags(blocks(noisy()), after=after)
    assert found["MEMORY_ALLOCATED"].evidence == "2 allocations from the driver during the timed blocks"
    assert found["COMPILED_DURING_TIMING"].evidence == "compilations during the timed blocks: 1"


@pytest.mark.parametrize(
    ("faults", "growth", "flagged"),
    [(0.0, 0.0, False), (255.0, 0.0, False), (8192.5, 0.0, True), (8192.0, 2**25, False)],
)
def test_memory_that_is_mapped_anew_in_every_call_is_noted(faults, growth, flagged):
    """What a call keeps needs new pages too: that is the growth's."""
    found = flags(blocks(noisy()), subject(page_faults=faults, memory_growth=growth))
    assert ("PAGE_FAULTS" in found) is flagged
    if flagged:
        assert found["PAGE_FAULTS"].evidence.startswith("8,192 page faults in each call")
        assert found["PAGE_FAULTS"].severity == "note"


@pytest.mark.parametrize(
    ("growth", "device", "flagged"),
    [
        (0.0, None, False),
        (2**20, None, False),
        (2**20 + 4096, None, True),
        (512.0, Device(), True),
        (0.0, Device(), False),
    ],
)
def test_memory_that_every_call_keeps_is_flagged(growth, device, flagged):
    """The resident size of a process moves by pages anyway; what a GPU's allocator counts is exact."""
    assert ("MEMORY_GROWS" in flags(blocks(noisy()), subject(device=device, memory_growth=growth))) is flagged


def test_changed_inputs_are_flagged_unless_they_are_reset():
    found = flags(blocks(noisy()), subject(mutated=(0, 2)))
    assert found["INPUT_MUTATED"].evidence == "the values of tensor argument 0, 2 differ after every call"
    assert flags(blocks(noisy()), subject(case=Case(len, X, reset=list), mutated=(0,))) == {}


def test_a_result_that_is_not_finite_is_flagged():
    assert list(flags(blocks(noisy()), subject(nonfinite=True))) == ["OUTPUT_NONFINITE"]


def test_a_case_without_tensor_arguments_is_noted():
    found = flags(blocks(noisy()), subject(case=Case(lambda: X)))
    assert list(found) == ["CLOSURE_INPUTS"]
    assert found["CLOSURE_INPUTS"].severity == "note"


def test_compilations_are_counted_where_the_compiler_was_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert Counters.now(subject()) == Counters(allocations=0, compilations=0)
    dynamo = types.SimpleNamespace(counters={"frames": collections.Counter(total=4, ok=3)})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    assert Counters.now(subject()).compilations == 4
