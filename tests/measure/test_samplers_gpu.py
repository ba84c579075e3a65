"""The instrument on a real GPU, against kernels of known length. Nothing here can run without one."""

import dataclasses
import time

import pytest
import torch

from nearpeak.calibrate import ceilings
from nearpeak.calibrate import machine as calibration
from nearpeak.errors import CaseError, UsageError
from nearpeak.machines import catalogue
from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.compare import compare
from nearpeak.measure.gpu import LONGEST_SPIN_SECONDS, Stage, gpu_instrument
from nearpeak.measure.instrument import can_time_in_graphs, eviction_ratio, profiled_seconds, zero_of
from nearpeak.measure.machine import known_machine
from nearpeak.measure.prepared import IDLE_SHARE, PROVEN_EVICTION, probe_gpu
from nearpeak.measure.samplers import STAGE_SECONDS, EventSampler, GraphSampler, RegressionSampler, WallSampler
from nearpeak.measure.selftest import spin_host
from nearpeak.measure.statistics import median

pytestmark = pytest.mark.gpu

QUICK = {"max_seconds": 0.3, "warmup_seconds": 0.02}


@pytest.fixture(scope="module")
def device():
    return gpu_instrument(torch.cuda.current_device())


@pytest.fixture(scope="module")
def spin(device):
    """Occupies the GPU for so many seconds of its own global timer."""
    launch = pytest.importorskip("nearpeak.measure.delay_kernel", exc_type=ImportError).delay_kernel(device.device)

    def spin(seconds):
        launch(round(seconds * 1e9))

    spin(1e-6)  # compiles it
    device.synchronize()
    return spin


def reading(sampler, blocks=9):
    sampler.block()
    return [sampler.block() for _ in range(blocks)]


def expect(blocks, seconds):
    """Within 3 % and the microsecond that starting and ending any kernel may take."""
    found = median([block.seconds for block in blocks])
    assert abs(found - seconds) <= 0.03 * seconds + 1e-6, (found, seconds)


def names(timing):
    return {flag.name for flag in timing.flags}


@pytest.mark.parametrize("cache", ["hot", "cold"])
@pytest.mark.parametrize("seconds", [5e-6, 50e-6, 500e-6, 5e-3])
def test_events_read_a_spin_of_known_length_with_its_launch_hidden(device, spin, seconds, cache):
    zero = zero_of(device.index, cache).events
    call = lambda: spin(seconds)  # noqa: E731
    call()
    sampler = EventSampler(
        device, call, Stage(device, cache), call_seconds=seconds, enqueue_seconds=50e-6, zero_seconds=zero
    )
    blocks = reading(sampler)
    expect(blocks, seconds)
    assert all(block.launch_hidden for block in blocks)
    assert all(len(block.readings) == sampler.calls for block in blocks)


@pytest.mark.parametrize("cache", ["hot", "cold"])
@pytest.mark.parametrize("seconds", [5e-6, 50e-6, 500e-6])
def test_events_in_a_graph_read_a_spin_of_known_length(device, spin, seconds, cache):
    if not can_time_in_graphs():
        pytest.skip("this torch cannot record timing events in a graph")
    zero = zero_of(device.index, cache).graph_events
    call = lambda: spin(seconds)  # noqa: E731
    call()
    sampler = GraphSampler(device, call, Stage(device, cache), call_seconds=seconds, zero_seconds=zero)
    expect(reading(sampler), seconds)


@pytest.mark.parametrize("seconds", [5e-6, 50e-6, 500e-6])
def test_the_regression_reads_a_spin_of_known_length(device, spin, seconds):
    gap = zero_of(device.index, "hot").gap
    call = lambda: spin(seconds)  # noqa: E731
    call()
    blocks = reading(RegressionSampler(device, call, call_seconds=seconds, gap_seconds=gap))
    expect(blocks, seconds)
    assert all(block.launch_hidden for block in blocks)


def test_the_zero_is_small_and_proven(device):
    for cache in ("hot", "cold"):
        zero = zero_of(device.index, cache)
        assert zero.proven
        assert 0 < zero.events < 20e-6
        assert zero.uncertainty < 2e-6
        assert -1e-6 < zero.gap < 5e-6


def test_a_launch_that_cannot_be_hidden_is_not_called_hidden(device, spin):
    def call():
        spin_host(round(1.5 * LONGEST_SPIN_SECONDS / 4 * 1e9))
        spin(1e-3)

    sampler = EventSampler(
        device, call, Stage(device, "hot"), call_seconds=1e-3, enqueue_seconds=LONGEST_SPIN_SECONDS, calls=4
    )
    assert sampler.block().launch_hidden is False


def test_a_spin_that_was_too_short_is_made_longer(device, spin):
    def call():
        spin_host(2_000_000)
        spin(100e-6)

    sampler = EventSampler(device, call, Stage(device, "hot"), call_seconds=100e-6, enqueue_seconds=1e-6, calls=5)
    before = sampler.spin_seconds
    block = sampler.block()
    assert block.launch_hidden
    assert sampler.spin_seconds > before
    expect([block], 100e-6 + zero_of(device.index, "hot").events)


def test_the_host_sees_what_it_waits_for(device, spin):
    call = lambda: spin(2e-3)  # noqa: E731
    kinds = {
        kind: median([block.seconds for block in reading(WallSampler(device, call, kind, call_seconds=2e-3), 5)])
        for kind in ("pipelined", "latency", "enqueue")
    }
    assert kinds["pipelined"] == pytest.approx(2e-3, rel=0.05)
    assert 2e-3 <= kinds["latency"] < 2.5e-3
    assert kinds["enqueue"] < 0.5e-3


def test_the_reset_is_outside_the_timed_region(device, spin):
    sampler = EventSampler(
        device,
        lambda: spin(100e-6),
        Stage(device, "hot", reset=lambda: spin(1e-3)),
        call_seconds=100e-6,
        enqueue_seconds=100e-6,
        zero_seconds=zero_of(device.index, "hot").events,
    )
    expect(reading(sampler), 100e-6)


def test_an_event_has_a_tick_and_a_pair_takes_some_time(device):
    assert 1e-9 <= device.event_tick() <= 2e-6
    assert 0 < device.event_pair_seconds() < 20e-6


def test_the_drivers_figures_are_read(device):
    if device.conditions.missing is not None:
        pytest.skip(device.conditions.missing)
    state = device.conditions.read()
    assert 1e8 < state.clock_hz <= 1.01 * device.conditions.highest_clock_hz()
    assert device.conditions.driver()


def test_the_eviction_evicts(device):
    assert eviction_ratio(device.index, device.sweep_bytes) > PROVEN_EVICTION


def test_a_broken_eviction_is_flagged_and_a_sound_one_is_not(device):
    case = Case(torch.neg, torch.randn(device.cache_bytes // 16 // 4, device=device.device))
    assert "CACHE_NOT_COLD" not in names(bench(case, **QUICK))
    device.sweep(1 / 16)
    try:
        assert "CACHE_NOT_COLD" in names(bench(case, **QUICK))
    finally:
        device.sweep()
    assert "CACHE_NOT_COLD" not in names(bench(case, **QUICK))


def test_cold_is_slower_than_hot_for_what_fits_in_the_cache(device):
    case = Case(torch.neg, torch.randn(device.cache_bytes // 16 // 4, device=device.device))
    assert bench(case, cache="cold", **QUICK).seconds > 1.1 * bench(case, cache="hot", **QUICK).seconds


def test_rotated_inputs_are_as_cold_as_flushed_ones(device):
    case = Case(torch.neg, torch.randn(device.cache_bytes // 2 // 4, device=device.device))
    flushed, rotated = (bench(case, evict=evict, **QUICK).seconds for evict in ("flush", "rotate"))
    assert rotated == pytest.approx(flushed, rel=0.15)


def test_a_call_that_waits_is_timed_by_the_host_and_flagged(device):
    timing = bench(lambda x: x.sum().item(), torch.randn(2**16, device=device.device), **QUICK)
    assert "SYNC_IN_REGION" in names(timing)
    assert timing.kind == "latency"
    assert timing.cpu_bound is None


def test_work_on_a_stream_that_nobody_waits_for_is_flagged(device):
    side = torch.cuda.Stream()

    def call(x):
        torch.add(x, 1)
        with torch.cuda.stream(side):
            torch.exp(x)

    timing = bench(call, torch.randn(2**26, device=device.device), **QUICK)
    assert "OFF_STREAM" in names(timing)
    assert timing.kind == "latency"


def test_work_on_a_stream_that_is_waited_for_is_fine(device):
    side = torch.cuda.Stream()
    out = torch.empty(2**24, device=device.device)

    def call(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.exp(x, out=out)
        torch.cuda.current_stream().wait_stream(side)

    timing = bench(call, torch.randn(2**24, device=device.device), **QUICK)
    assert "OFF_STREAM" not in names(timing)
    assert timing.kind in ("device", "graph")


def refuses_capture(x):
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("this call refuses to be captured\nsecond line")
    return torch.exp(x)


def test_a_graph_that_was_asked_for_and_cannot_be_had_is_an_error(device):
    with pytest.raises(CaseError) as caught:
        bench(refuses_capture, torch.randn(2**16, device=device.device), kind="graph", **QUICK)
    message = "refuses_capture cannot be captured in a CUDA graph: this call refuses to be captured"
    assert str(caught.value).startswith(message)
    assert "second line" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert torch.ones(3, device=device.device).sum().item() == 3  # the device still works


def test_a_graph_that_was_only_preferred_is_replaced_and_noted(device):
    timing = bench(refuses_capture, torch.randn(2**14, device=device.device), **QUICK)
    assert timing.kind == "device"
    assert timing.method.startswith("CUDA events around each call, behind a spin")
    assert "NO_GRAPH" in names(timing)
    assert "graph" not in timing.other_seconds


def test_random_numbers_can_be_drawn_after_a_capture_that_failed(device):
    """A backward pass runs on the stream of its forward pass, which is not the one that captures."""
    x = torch.randn(2**14, device=device.device, requires_grad=True)
    y = torch.exp(x)
    gradient = torch.ones_like(y)
    bench(lambda: torch.autograd.grad(y, x, gradient, retain_graph=True), **QUICK)
    assert torch.randn(3, device=device.device).isfinite().all()


def test_a_graph_of_rotated_inputs_is_refused(device):
    with pytest.raises(UsageError, match="use evict='flush' for a cold graph time"):
        bench(torch.neg, torch.randn(device.cache_bytes // 4, device=device.device), kind="graph", evict="rotate")


def test_the_cpu_kind_is_refused(device):
    with pytest.raises(UsageError, match="kind='cpu' is for code on the CPU"):
        bench(torch.exp, torch.randn(3, device=device.device), kind="cpu")


def test_all_kinds_of_time_are_taken(device):
    timing = bench(torch.exp, torch.randn(2**22, device=device.device), **QUICK)
    assert timing.kind == "device"
    assert set(timing.other_seconds) >= {"enqueue", "pipelined", "latency"}
    assert timing.other_seconds["latency"] > timing.seconds
    assert len(timing.kernels) == 1
    assert timing.environment.device == device.name


@pytest.mark.parametrize("kind", ["device", "graph", "pipelined", "latency", "enqueue"])
def test_each_kind_can_be_asked_for(device, kind):
    if kind == "graph" and not can_time_in_graphs():
        pytest.skip("this torch cannot record timing events in a graph")
    timing = bench(torch.exp, torch.randn(2**20, device=device.device), kind=kind, **QUICK)
    assert timing.kind == kind
    assert timing.low <= timing.seconds <= timing.high


def test_a_slow_host_is_told_apart_and_the_device_time_is_right_all_the_same(device):
    a = torch.randn(4096, 4096, device=device.device, dtype=torch.bfloat16)

    def slow(a):
        for _ in range(100_000):
            pass
        return a @ a

    clean = bench(torch.mm, a, a, max_seconds=1.0)
    delayed = bench(slow, a, max_seconds=1.0)
    assert delayed.cpu_bound
    assert not clean.cpu_bound
    assert delayed.seconds == pytest.approx(clean.seconds, rel=0.03)


@pytest.mark.parametrize("elements", [2**16, 2**20, 2**24])
def test_device_times_agree_with_the_profilers_kernel_durations(device, elements):
    case = Case(torch.exp, torch.randn(elements, device=device.device))
    timing = bench(case, max_seconds=0.5)
    stage = Stage(device, "cold", pace_seconds=max(0.0, IDLE_SHARE * timing.seconds - STAGE_SECONDS))
    truth = profiled_seconds(case.call, stage, device)
    if truth is None:
        pytest.skip("the profiler sees no kernels here")
    assert abs(timing.seconds - truth) <= max(0.03 * truth, 0.3e-6), (timing.seconds, truth)


@pytest.mark.parametrize("elements", [2**16, 2**24])
def test_the_same_code_is_not_called_different(device, elements):
    x = torch.randn(elements, device=device.device)
    result = compare(torch.sin, torch.sin, x, margin=0.05, max_seconds=0.5)
    assert result.verdict not in ("FASTER", "SLOWER")
    assert result.ratio == pytest.approx(1, abs=0.05)


def test_a_known_ratio_is_found(device, spin):
    anchor = torch.zeros(1, device=device.device)
    result = compare(
        Case(lambda anchor: spin(200e-6), anchor, name="short"),
        Case(lambda anchor: spin(220e-6), anchor, name="long"),
        max_seconds=0.5,
    )
    assert result.verdict == "SLOWER"
    assert result.ratio == pytest.approx(1.1, abs=0.01)


def test_a_leak_is_counted_to_the_byte(device):
    kept = []
    x = torch.randn(3, device=device.device)
    found = probe_gpu(Case(lambda x: kept.append(torch.ones(2**20, device=x.device)), x), device, kernels=False)
    assert found.memory_growth == 2**22


def test_a_leak_without_end_is_refused(device):
    kept = []
    free = torch.cuda.mem_get_info(device.device)[0]
    size = free // 100
    x = torch.randn(3, device=device.device)
    try:
        with pytest.raises(CaseError, match="MiB more with every call; a few hundred calls would fill the memory"):
            bench(lambda x: kept.append(torch.empty(size, dtype=torch.uint8, device=x.device)), x, **QUICK)
    finally:
        kept.clear()
        torch.cuda.empty_cache()


def test_running_out_of_memory_is_called_that(device):
    too_much = 2 * torch.cuda.get_device_properties(device.index).total_memory
    x = torch.randn(3, device=device.device)
    with pytest.raises(CaseError, match=r"ran out of memory on its first call: .* Use smaller inputs"):
        bench(lambda x: torch.empty(too_much, dtype=torch.uint8, device=x.device), x, **QUICK)


def test_a_case_without_tensors_runs_where_its_kernels_run(device):
    timing = bench(lambda: torch.ones(2**20, device="cuda"), **QUICK)
    assert timing.kind in ("device", "graph")
    assert "CLOSURE_INPUTS" in names(timing)


def test_calibration_finds_sane_figures_and_keeps_them(device, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    effort = dataclasses.replace(ceilings.FULL_EFFORT, shapes=((4096, 4096, 4096),))
    monkeypatch.setattr(ceilings, "FULL_EFFORT", effort)
    monkeypatch.setattr(ceilings, "GPU_SUSTAINED_SECONDS", 0.2)
    monkeypatch.setattr("nearpeak.calibrate.efficiency.measure_efficiency", lambda machine, progress: machine)
    start = time.perf_counter()
    measured = calibration.machine(calibrate=True)
    assert time.perf_counter() - start < 60
    found = measured.achievable
    assert found.how == "measured"
    assert 1e11 < found.bandwidth < 2e13
    assert found.cache_bandwidth is None or found.cache_bandwidth > found.bandwidth
    assert found.matrix["float16"] > found.vector["float32"] > 1e12
    assert 0.5e-6 < found.launch.enqueue < 100e-6
    assert 0.1e-6 < found.launch.in_graph < 20e-6
    assert 1e9 < found.host_to_device < 1e12
    datasheet = catalogue.by_driver_name(device.name)
    if datasheet is not None:
        assert 0.5 * datasheet.theoretical.bandwidth < found.bandwidth <= 1.02 * datasheet.theoretical.bandwidth
        peak = datasheet.theoretical.matrix["float16"]
        assert 0.3 * peak < found.matrix["float16"] <= 1.05 * peak
    assert calibration.machine() == measured
    assert known_machine(device) == measured


def test_an_allocation_has_a_time_of_the_host_and_says_so():
    timing = bench(lambda: torch.empty(2**20, device="cuda"), **QUICK)
    assert timing.kind == "enqueue" and "NO_KERNELS" in names(timing)
    assert timing.seconds < 2e-5
    filled = bench(lambda: torch.zeros(2**28, dtype=torch.bfloat16, device="cuda"), **QUICK)
    assert filled.kind == "device" and filled.seconds > 1e-4


def test_tensors_of_the_host_do_not_hide_work_on_the_device():
    weight, x = torch.randn(4096, 4096, device="cuda"), torch.randn(64, 4096)
    assert bench(lambda rows: rows.cuda() @ weight, x, **QUICK).kind != "cpu"
