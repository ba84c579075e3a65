import dataclasses
from functools import partial

import pytest
import torch

from nearpeak._display import StatusLine
from nearpeak.calibrate import efficiency as module
from nearpeak.calibrate.efficiency import KernelProbe, kernel_probes, measure_efficiency
from nearpeak.calibrate.progress import CalibrationProgress
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Achievable
from nearpeak.trace.trace import trace


@pytest.fixture
def machine():
    rates = {"float32": 1e9, "float64": 1e9}
    achievable = Achievable(how="measured", note="made up", bandwidth=1e6, matrix={}, vector=rates)
    return dataclasses.replace(detect_cpu(), achievable=achievable, cache_bytes=None)


@pytest.mark.slow
def test_each_probe_is_one_op_that_does_something():
    for probe in kernel_probes(torch.device("cpu")):
        recorded = trace(probe.build(probe.sizes[0]), live=True)
        doing = [op.name for op in recorded.ops if op.outputs and op.outputs[0].storage != op.inputs[0].storage]
        assert len(doing) <= 1, (probe.name, doing)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_probe_has_a_name_of_its_own(device):
    names = [probe.name for probe in kernel_probes(torch.device(device))]
    assert len(set(names)) == len(names)


def test_rounds_trace_each_call_once_and_build_the_second_call_where_the_timer_asks(machine, monkeypatch):
    traced, built = [], []

    def build(size):
        built.append(size)
        return partial(torch.add, torch.ones(size), 1.0)

    monkeypatch.setattr(
        module, "kernel_probes", lambda device: iter([KernelProbe(name="a", sizes=(8, 16), build=build)])
    )
    monkeypatch.setattr(module, "trace", lambda call, **options: traced.append(call) or trace(call, **options))
    monkeypatch.setattr(module, "_host_timer", lambda: lambda call, build_second: (1.0, None))
    measure_efficiency(machine)
    assert len(traced) == 2
    assert built == [8, 16] * module.HOST_ROUNDS


def test_a_probe_is_kept_under_its_kind_and_those_it_stands_for(machine, monkeypatch):
    def add(size):
        x = torch.ones(size)
        return lambda: x + x.neg()

    made = [KernelProbe(name="add", sizes=(64, 4096), build=add, stands_for=("pointwise",))]
    monkeypatch.setattr(module, "kernel_probes", lambda device: iter(made))
    monkeypatch.setattr(module, "_host_timer", lambda: lambda call, other: (1.0, None))
    found = measure_efficiency(machine).achievable.efficiency
    assert set(found) == {"aten.add", "pointwise"}
    small, large = found["pointwise"]
    # neg: 2 tensors, add: 3 (the negative is read again: no cache here), 4 bytes each, a million of them a second
    assert small.bound_seconds == pytest.approx(5 * 64 * 4 / 1e6)
    assert small.ratio == pytest.approx(1.0 / small.bound_seconds)
    assert large.bound_seconds == pytest.approx(64 * small.bound_seconds)


@pytest.mark.slow
def test_what_cannot_run_here_is_left_out_and_said(machine, monkeypatch):
    def fails(size):
        raise NotImplementedError("no such kernel\nmore")

    lines = []
    made = [KernelProbe(name="missing", sizes=(64,), build=fails)]
    monkeypatch.setattr(module, "kernel_probes", lambda device: iter(made))
    assert measure_efficiency(machine, CalibrationProgress(lines.append, "m")).achievable.efficiency == {}
    assert [line for line in lines if not isinstance(line, StatusLine)] == [
        "kernels: missing is left out: no such kernel"
    ]


def test_of_a_host_the_median_round_counts(machine, monkeypatch):
    times = iter([(5.0, None), (2.0, None), (9.0, None), (3.0, None), (4.0, None)])
    made = [KernelProbe(name="add", sizes=(64,), build=lambda size: partial(torch.add, torch.ones(size), 1.0))]
    monkeypatch.setattr(module, "kernel_probes", lambda device: iter(made))
    monkeypatch.setattr(module, "_host_timer", lambda: lambda call, other: next(times))
    (point,) = measure_efficiency(machine).achievable.efficiency["aten.add"]
    assert point.ratio * point.bound_seconds == pytest.approx(4.0)


def test_what_was_timed_in_the_cache_is_kept_as_a_kind_of_its_own(machine, monkeypatch):
    """The bound is then that of the cache; a tensor that is no part of the cache's size is not taken for cached."""
    machine = dataclasses.replace(
        machine, cache_bytes=2.0**14, achievable=dataclasses.replace(machine.achievable, cache_bandwidth=4e6)
    )
    made = [KernelProbe(name="add", sizes=(64, 4096), build=lambda size: partial(torch.add, torch.ones(size), 1.0))]
    monkeypatch.setattr(module, "kernel_probes", lambda device: iter(made))
    monkeypatch.setattr(module, "_host_timer", lambda: lambda call, other: (1.0, 0.5))
    found = measure_efficiency(machine).achievable.efficiency
    assert [point.ratio * point.bound_seconds for point in found["aten.add"]] == pytest.approx([1.0, 1.0])
    (cached,) = found["aten.add/cached"]
    assert cached.bound_seconds == pytest.approx(2 * 64 * 4 / 4e6)
    assert cached.ratio == pytest.approx(0.5 / cached.bound_seconds)


@pytest.mark.slow
def test_the_real_probes_are_timed(machine, monkeypatch):
    few = [probe for probe in kernel_probes(torch.device("cpu")) if probe.name in ("add", "mean", "product float32")]
    monkeypatch.setattr(
        module, "kernel_probes", lambda device: iter([dataclasses.replace(p, sizes=p.sizes[:1]) for p in few])
    )
    found = measure_efficiency(machine).achievable.efficiency
    assert {"aten.add", "pointwise", "aten.mean", "reduction", "matrix/compute"} <= set(found)
    assert all(point.ratio > 0 for points in found.values() for point in points)
