import types

import pytest
import torch

from nearpeak.bound import expected
from nearpeak.calibrate import ceilings as module
from nearpeak.calibrate.ceilings import CeilingCollector, best_rate, calibrate_host, median_duration
from nearpeak.calibrate.progress import CalibrationProgress
from nearpeak.machines.machine import Ceiling
from nearpeak.measure.timing import Block


class FakeSampler:
    kind, method, calls = "cpu", "made up", 1

    def __init__(self, *values):
        self.values = list(values)

    def block(self):
        value = self.values.pop(0)
        return Block(seconds=value, readings=(value,))


def ceiling(value):
    return Ceiling(value=value, spread=0.0, how="made up")


def test_a_rate_is_the_best_of_the_blocks_after_the_first():
    sampler = FakeSampler(1e-9, 2.0, 1.0, 4.0)
    found = best_rate(sampler, 100.0, "copy", blocks=3)
    assert found.value == 100.0
    assert found.how == "copy"
    assert found.spread == pytest.approx((90 - 30) / 50)  # 10 % to 90 % of 25, 50 and 100, over the middle one
    assert sampler.values == []


def test_a_duration_is_the_median_of_the_blocks_after_the_first():
    found = median_duration(FakeSampler(99.0, 3.0, 1.0, 2.0), "small", blocks=3)
    assert found.value == 2.0
    assert found.spread == pytest.approx(0.8)


def test_steady_blocks_have_no_spread():
    assert best_rate(FakeSampler(*[2.0] * 10), 1.0, "").spread == 0


def test_the_best_of_several_ways_is_kept():
    ceilings = CeilingCollector()
    for value in (2.0, 3.0, 1.0):
        ceilings.best("cache_bandwidth", ceiling(value))
    assert ceilings.value("cache_bandwidth") == 3.0
    ceilings.set("cache_bandwidth", ceiling(1.0))
    assert ceilings.value("cache_bandwidth") == 1.0
    assert ceilings.value("nothing") is None


def test_a_group_is_what_follows_its_prefix():
    ceilings = CeilingCollector()
    for name in ("matrix.bfloat16", "matrix.float8", "matrix_sustained.bfloat16", "vector.float32"):
        ceilings.set(name, ceiling(len(name)))
    assert ceilings.group("matrix") == {"bfloat16": 15, "float8": 13}
    assert ceilings.group("matrix_sustained") == {"bfloat16": 25}
    assert ceilings.group("launch") == {}


def test_what_was_found_becomes_the_ceilings_of_a_machine():
    ceilings = CeilingCollector()
    found = {
        "bandwidth.copy": 3.0,
        "bandwidth.read": 4.0,
        "cache_bandwidth": 9.0,
        "matrix.bfloat16": 100.0,
        "matrix_sustained.bfloat16": 80.0,
        "vector.float32": 10.0,
        "host_to_device.pinned": 0.5,
        "host_to_device.pageable": 0.2,
        "launch.enqueue": 4e-6,
        "launch.event_tick": 3.2e-8,
    }
    for name, value in found.items():
        ceilings.set(name, ceiling(value))
    achievable = ceilings.achievable()
    assert achievable.how == "measured"
    assert f"torch {torch.__version__}" in achievable.note
    assert achievable.bandwidth == 4.0
    assert achievable.cache_bandwidth == 9.0
    assert achievable.matrix == {"bfloat16": 100.0}
    assert achievable.matrix_sustained == {"bfloat16": 80.0}
    assert achievable.vector == {"float32": 10.0}
    assert (achievable.host_to_device, achievable.host_to_device_pageable) == (0.5, 0.2)
    assert (achievable.device_to_host, achievable.device_to_device) == (None, None)
    assert (achievable.launch.enqueue, achievable.launch.event_tick, achievable.launch.in_graph) == (4e-6, 3.2e-8, None)
    assert {name: c.value for name, c in achievable.ceilings.items()} == found


@pytest.mark.slow
def test_a_small_calibration_of_this_cpu(monkeypatch):
    facts = types.SimpleNamespace(cache_bytes=2**16, matrix_engine=None)
    monkeypatch.setattr(module, "detect_cpu", lambda: facts)
    monkeypatch.setattr(module, "HOST_GEMM_SIZES", (16, 32))
    monkeypatch.setattr(module, "HOST_SUSTAINED_SECONDS", 0.01)
    sizes = []
    bandwidths = module._host_bandwidths

    def small_bandwidths(ceilings, size):
        sizes.append(size)
        bandwidths(ceilings, 2**20)

    monkeypatch.setattr(module, "_host_bandwidths", small_bandwidths)
    lines = []
    found = calibrate_host(CalibrationProgress(lines.append, "measuring"))
    assert sizes == [2**27]  # at least this, and past the cache
    assert 1e6 < found.bandwidth < 1e14
    assert found.bandwidth == max(found.ceilings[f"bandwidth.{way}"].value for way in ("copy", "read", "fill", "triad"))
    assert found.cache_bandwidth > 0
    assert found.matrix == {}
    assert {"float32", "float64"} <= set(found.vector)
    assert all(1e6 < rate < 1e15 for rate in found.vector.values())
    assert found.matrix_sustained["float32"] > 0
    assert 1e-8 < found.launch.host_call < 1e-3
    assert 0.0 <= found.launch.cold_start < 1e-2
    assert found.launch.enqueue is None
    assert [line.partition("(")[2].rstrip(")") for line in lines] == [
        *("small ops", "memory", "cache", "exp, tanh ...", "small ops"),
        *(f"GEMM {dtype}" for dtype in ("float32", "float64", "bfloat16", "float16", "int8")),
        "small ops",
    ]


def test_kernels_with_transcendental_functions_have_rates(monkeypatch):
    monkeypatch.setattr(module, "TRANSCENDENTAL_ELEMENTS", 2**8)
    monkeypatch.setattr(module, "_hot_sampler", lambda call: call() is not None and FakeSampler(*[2e-6] * 6))
    ceilings = CeilingCollector()
    module._host_transcendental(ceilings)
    names = {name.partition(".")[2] for name in ceilings.figures}
    assert {"exp", "tanh", "erf", "gelu", "gelu_tanh", "gelu_backward", "gelu_backward_tanh"} < names
    kernels = {kernel for packet, kernel in expected._TRANSCENDENTAL.items()}
    assert kernels | {"gelu_tanh", "gelu_backward_tanh"} == names  # what ops stand for, and nothing else
    assert {ceiling.value for ceiling in ceilings.figures.values()} == {2**8 / 2e-6}


def test_a_gpu_is_measured_in_the_order_of_need_and_quickly_only_in_part():
    def tasks(effort, **options):
        return list(module._gpu_tasks(CeilingCollector(), None, effort, **options))

    full = tasks(module.FULL_EFFORT, all_dtypes=True)
    assert all(task.needed for task in full)
    assert len({task.name for task in full}) == len(full)
    in_part = tasks(module.QUICK_EFFORT, all_dtypes=False)
    assert [task.name for task in in_part][:5] == [
        "memory",
        "cache",
        "launches",
        "GEMM bfloat16",
        "GEMM bfloat16, sustained",
    ]
    assert [task.name for task in in_part if task.needed] == [task.name for task in in_part][:5]  # whatever the time
    assert {task.name for task in in_part} < {task.name for task in full}
    needed = {task.name for task in tasks(module.QUICK_EFFORT, all_dtypes=True) if task.needed}
    assert {f"GEMM {dtype}" for dtype in module._gpu_gemms(None)} < needed  # no datasheet has them
    assert 14.0 < sum(task.seconds for task in full) < 18.0  # 16 s were measured on an H200
    common = [task.seconds for task in in_part if task.name not in ("vector units", "GEMM int8", "GEMM float64")]
    assert sum(common) <= module.QUICK_GPU_SECONDS + 0.1


def test_a_matrix_engine_makes_its_dtypes_matrix_rates(monkeypatch):
    monkeypatch.setattr(module, "HOST_GEMM_SIZES", (16,))
    ceilings = CeilingCollector()
    module._host_gemms(ceilings, torch.bfloat16, "AMX")
    assert set(ceilings.figures) == {"matrix.bfloat16"}


def test_products_stop_before_one_takes_too_long(monkeypatch):
    sizes = []

    def product(size, dtype):
        sizes.append(size)
        return lambda: None

    monkeypatch.setattr(module, "_host_gemm", product)
    monkeypatch.setattr(module, "_hot_sampler", lambda call: FakeSampler(*[1.0] * 20))  # 1 s, whatever the size
    monkeypatch.setattr(module, "HOST_GEMM_SIZES", (16, 32, 64))
    module._host_gemms(CeilingCollector(), torch.float64, None)
    assert sizes == [16]


def test_a_product_that_this_torch_lacks_is_left_out(monkeypatch):
    def product(size, dtype):
        def call():
            raise RuntimeError('"addmm_impl_cpu_" not implemented for this dtype')

        return call

    monkeypatch.setattr(module, "_host_gemm", product)
    ceilings = CeilingCollector()
    module._host_gemms(ceilings, torch.float16, None)
    assert ceilings.figures == {}
