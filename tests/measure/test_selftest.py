import gc
import types

import pytest
import torch

from nearpeak.errors import UsageError
from nearpeak.measure import prepared, selftest
from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.results import Experiment, SelfTestReport
from nearpeak.measure.selftest import EXPERIMENTS, Place, run, spin_host
from nearpeak.measure.timing import Block
from nearpeak.render.views import selftest as render

CPU = Place(gpu=None, spin=spin_host)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU where there is one")


def report(*experiments, quick=False, device="cpu"):
    return SelfTestReport(
        device=device, torch="2.13.0", date="2026-01-02T03:04:05+00:00", quick=quick, experiments=experiments
    )


def experiment(name="spin", passed=True, found="slope 1.0001", **fields):
    return Experiment(
        name=name, question="is it?", expected="it is", found=found, passed=passed, **{"seconds": 1.6, **fields}
    )


def test_a_report_passes_if_nothing_failed():
    assert report(experiment(), experiment(passed=None)).passed
    assert not report(experiment(), experiment(passed=False)).passed
    assert report().passed


def test_a_report_reads():
    text = render.text(report(experiment(), experiment("same", False, "7 false in 40"), experiment("waiting", None)))
    assert text.splitlines() == [
        "Self-test on cpu, torch 2.13.0, 2026-01-02T03:04:05+00:00",
        "",
        "ok      spin: is it? (2 s)",
        "        expected it is",
        "        found    slope 1.0001",
        "",
        "FAILED  same: is it? (2 s)",
        "        expected it is",
        "        found    7 false in 40",
        "",
        "not run waiting: is it? (2 s)",
        "        expected it is",
        "        found    slope 1.0001",
        "",
        "1 ok, 1 FAILED, 1 not run",
    ]


def test_a_report_fits_80_columns_and_says_if_it_was_quick():
    long = "a finding with many words " * 12
    wordy = Experiment(name="drift", question=long, expected=long, found=long, passed=True)
    text = render.text(report(wordy, quick=True, device="NVIDIA RTX PRO 6000 Blackwell Server Edition"))
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    assert words.count(long.strip()) == 3  # nothing is cut off
    assert "2026-01-02T03:04:05+00:00, quick" in words


def test_the_experiments_are_those_that_the_documentation_lists():
    names = "spin sleep waiting copy eviction referee ratio coverage same drift faults"
    assert list(EXPERIMENTS) == names.split()


def test_an_unknown_experiment_is_answered_with_the_nearest_before_anything_runs(monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "spin", pytest.fail)
    with pytest.raises(UsageError, match=r"There is no experiment 'drifts'. Did you mean 'drift'\?"):
        run(["spin", "drifts"])


def test_experiments_run_in_the_order_asked_and_tell_their_progress(monkeypatch):
    def fake(name):
        return lambda place, quick: experiment(name, seconds=0.0, found=f"quick is {quick}")

    monkeypatch.setitem(EXPERIMENTS, "same", fake("same"))
    monkeypatch.setitem(EXPERIMENTS, "spin", fake("spin"))
    lines = []
    found = run(["spin", "same"], quick=True, progress=lines.append)
    assert [e.name for e in found.experiments] == ["spin", "same"]
    assert found.quick
    assert found.torch == torch.__version__
    assert all(e.seconds > 0 for e in found.experiments)
    assert lines == [
        "self-test: spin",
        "self-test: spin: quick is True",
        "self-test: same",
        "self-test: same: quick is True",
    ]


@pytest.mark.slow
@on_cpu
def test_the_spin_experiment_on_this_cpu():
    found = run(["spin"], quick=True)
    (spin,) = found.experiments
    assert found.device == "cpu"
    assert spin.name == "spin"
    assert isinstance(spin.passed, bool)  # which depends on this machine's noise
    assert [row["true"] for row in spin.data["rows"]] == list(selftest.LENGTHS[::3])
    assert all(row["low"] <= row["reported"] <= row["high"] for row in spin.data["rows"])
    assert max(len(line) for line in render.text(found).splitlines()) <= 80


@pytest.mark.parametrize(("slope", "passed"), [(1.0, True), (1.008, True), (1.02, False), (0.98, False)])
def test_the_spin_experiment_judges_the_slope_and_not_the_intercept(monkeypatch, slope, passed):
    def fake_bench(case, **options):
        spun.clear()
        case.call()
        seconds = 0.5e-6 + slope * spun[0] * 1e-9
        return types.SimpleNamespace(seconds=seconds, low=seconds, high=seconds)

    spun = []
    monkeypatch.setattr(selftest, "bench", fake_bench)
    found = selftest.delay_linearity(Place(gpu=None, spin=spun.append), False)
    assert found.passed is passed
    assert found.data["slope"] == pytest.approx(slope, abs=1e-6)
    assert found.data["intercept"] == pytest.approx(0.5e-6, abs=1e-9)
    assert len(found.data["rows"]) == len(selftest.LENGTHS)
    assert found.found.startswith(f"slope {slope:.4f}, intercept 500 ns, worst point off the line by 0.00 %")


def test_the_fit_weighs_relative_errors_and_has_its_example():
    assert ">>> " in selftest.relative_fit.__doc__
    slope, intercept = selftest.relative_fit([1e-6, 1e-3, 1e-1], [2e-6, 1.001e-3, 1.2e-1])
    assert slope == pytest.approx(1.1, abs=0.01)  # between 1.0 and 1.2; a fit by absolute errors would say 1.2
    assert intercept == pytest.approx(0.9e-6, rel=0.01)


def test_a_host_spin_lasts_as_long_as_told():
    import time

    start = time.perf_counter_ns()
    spin_host(2_000_000)
    assert time.perf_counter_ns() - start >= 2_000_000


def test_a_spin_case_asks_anew_at_every_call():
    spun = []
    place = Place(gpu=None, spin=spun.append)
    lengths = iter([5, 7])
    case = place.spin_case(lambda: next(lengths))
    case.call()
    case.call()
    place.spin_case(3).call()
    assert spun == [5, 7, 3]
    assert [tensor.device.type for tensor in case.tensors()] == ["cpu"]


@pytest.mark.parametrize("name", ["spin", "ratio", "drift"])
def test_experiments_that_need_a_spin_say_so_where_there_is_none(name):
    found = EXPERIMENTS[name](Place(gpu=None, spin=None), True)
    assert (found.passed, found.found) == (None, "needs triton")


def test_waiting_needs_a_gpu():
    found = EXPERIMENTS["waiting"](CPU, True)
    assert (found.passed, found.found) == (None, "needs a GPU and triton")


def test_false_verdicts_are_counted():
    results = {
        "sine": {"FASTER": 1, "SLOWER": 1, "EQUIVALENT": 38, "INCONCLUSIVE": 0},
        "sum": {"FASTER": 0, "SLOWER": 0, "EQUIVALENT": 20, "INCONCLUSIVE": 20},
    }
    found = selftest._false_verdicts("same", "?", results)
    assert found.found == "2 false in 80 (2.5 %), 72 % equivalent"
    assert found.passed
    results["sum"] = {"FASTER": 3, "SLOWER": 0, "EQUIVALENT": 37, "INCONCLUSIVE": 0}
    assert not selftest._false_verdicts("same", "?", results).passed


def test_coverage_counts_the_runs_whose_interval_holds_the_truth():
    from nearpeak.measure.options import Options

    blocks = [Block(seconds=value, readings=(value,)) for value in [1.0, 1.001, 0.999, 1.0005] * 40]
    assert selftest._covered(blocks, 1.0, Options(precision=0.01)) == 1.0
    assert selftest._covered(blocks, 2.0, Options(precision=0.01)) == 0.0


def live_tensor_bytes(index):
    """What Python holds in tensors: exact, where a process's size depends on what its allocator kept."""
    tensors = (item for item in gc.get_objects() if type(item) is torch.Tensor)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("DEGENERATE_INPUT", selftest._zeros),
        ("INPUT_MUTATED", selftest._mutates),
        ("OUTPUT_NONFINITE", selftest._overflows),
        ("CLOSURE_INPUTS", selftest._closure),
        ("PRECISION_NOT_REACHED", selftest._no_time),
        ("MEMORY_GROWS", selftest._grows),
        ("PAGE_FAULTS", selftest._maps_anew),
        ("COMPILED_DURING_TIMING", selftest._compiles),
        ("ABOVE_ROOFLINE", selftest._impossible),
    ],
)
def test_a_fault_raises_its_own_flag(name, fault, monkeypatch):
    if name == "MEMORY_GROWS":
        monkeypatch.setattr(prepared.CPU, "allocated_bytes", live_tensor_bytes)
    monkeypatch.setattr(prepared, "host_eviction_ratio", lambda: 2.0)  # of a busy machine it may be anything
    timing = fault(CPU)
    found = {flag.name: flag.severity for flag in timing.flags}
    assert name in found
    assert not [other for other, severity in found.items() if severity == "wrong" and other != name]


def test_every_fault_belongs_to_a_flag_and_can_be_left_out_only_by_name():
    from nearpeak.measure.timing import flag_names

    assert set(selftest._FAULTS) <= set(flag_names())
    assert set(selftest._FAULTS) >= selftest._GPU_ONLY
    assert set(selftest._FAULTS) >= selftest._SLOW


@pytest.mark.slow
def test_the_faults_experiment_names_what_was_missed(monkeypatch):
    def sound(place):
        return bench(torch.exp, torch.randn(64), **selftest._QUICK, precision=0.5)

    monkeypatch.setattr(
        selftest,
        "_FAULTS",
        {"OUTPUT_NONFINITE": selftest._overflows, "DRIFT": sound, "OFF_STREAM": sound},
    )
    monkeypatch.setattr(selftest, "_endless_memory_is_refused", lambda place: True)
    found = selftest.injected_faults(CPU, quick=True)
    assert found.passed is False
    assert found.found.startswith("2 of 3 raised; missed: DRIFT")  # OFF_STREAM needs a GPU


@on_cpu
def test_a_broken_eviction_is_put_back(monkeypatch):
    from nearpeak.measure import instrument, samplers

    seen = []
    monkeypatch.setattr(selftest, "bench", lambda case, **options: seen.append(samplers.HOST_EVICT_FACTOR))
    sound = samplers.HOST_EVICT_FACTOR
    selftest._bench_with_broken_eviction(CPU, Case(torch.neg, torch.ones(3)))
    assert seen == [1 / 64]
    assert sound == samplers.HOST_EVICT_FACTOR
    assert instrument.host_eviction_ratio.cache_info().currsize == 0
