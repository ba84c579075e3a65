import dataclasses

import pytest
from made_up import slow_cpu

from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.expected import expected_seconds, interpolate, kinds_of
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Achievable, Ceiling, EfficiencyPoint, LaunchCost, Machine
from nearpeak.machines.reference import reference_efficiency
from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op, Storage, Trace
from nearpeak.ops.tensor import Tensor

POINTS = (EfficiencyPoint(bound_seconds=1e-6, ratio=4.0), EfficiencyPoint(bound_seconds=1e-4, ratio=1.0))


def tensor(shape, storage, strides=None, dtype="bfloat16"):
    if strides is None:
        strides, step = [], 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
    return Tensor(shape=tuple(shape), strides=tuple(strides), dtype=dtype, storage=storage)


def op(name, inputs, output):
    names = {"aten.mm.default": ("self", "mat2"), "aten.clone.default": ("self",)}.get(name, ("self", "other"))
    return Op(name=name, arguments=dict(zip(names, inputs, strict=True)), outputs=(output,))


def first_kinds(operation, limiter="memory"):
    return list(kinds_of(operation, cost_of(operation), limiter))


@pytest.mark.parametrize(("bound", "expected"), [(1e-9, 4e-6), (1e-6, 4e-6), (1e-5, 2e-5), (1e-4, 1e-4), (1e-2, 1e-2)])
def test_a_small_kernel_takes_its_fixed_time_and_a_large_one_its_ratio(bound, expected):
    assert interpolate(POINTS, bound) == pytest.approx(expected)


def test_the_time_never_falls_as_the_bound_grows():
    times = [interpolate(POINTS, 1e-8 * 1.1**step) for step in range(150)]
    assert times == sorted(times)


def test_the_order_of_the_elements_makes_another_kind():
    plain = op("aten.add.Tensor", (tensor((64, 32), 0), tensor((64, 32), 1)), tensor((64, 32), 2))
    broadcast = op("aten.add.Tensor", (tensor((64, 32), 0), tensor((64, 32), 1, (0, 1))), tensor((64, 32), 2))
    transposed = op("aten.clone.default", (tensor((64, 32), 0, (1, 64)),), tensor((64, 32), 1))
    assert first_kinds(plain) == ["aten.add", "pointwise", "any"]
    assert first_kinds(broadcast)[:2] == ["aten.add/permuted", "pointwise/permuted"]
    assert first_kinds(transposed)[:2] == ["aten.clone/transposed", "movement/transposed"]


def test_a_product_is_known_by_its_dtype_and_by_what_limits_it():
    product = op("aten.mm.default", (tensor((64, 32), 0), tensor((32, 64), 1)), tensor((64, 64), 2))
    assert first_kinds(product, "compute")[:2] == ["matrix/compute/bfloat16", "matrix/compute"]
    assert first_kinds(product, "memory")[:2] == ["matrix/memory/bfloat16", "matrix/memory"]
    narrow = op("aten.mm.default", (tensor((64, 32), 0), tensor((32, 32), 1)), tensor((64, 32), 2))
    assert first_kinds(narrow, "compute")[:2] == ["matrix/compute/narrow", "matrix/compute/bfloat16"]
    assert first_kinds(narrow, "memory")[:2] == ["matrix/memory/bfloat16", "matrix/memory"]


def test_where_the_cache_limits_what_was_measured_there_comes_first():
    plain = op("aten.add.Tensor", (tensor((64, 32), 0), tensor((64, 32), 1)), tensor((64, 32), 2))
    assert first_kinds(plain, "cache") == [
        "aten.add/cached",
        "aten.add",
        "pointwise/cached",
        "pointwise",
        "any/cached",
        "any",
    ]


def test_a_product_near_the_ridge_takes_the_longer_of_both_limits():
    """Here compute is reached worse than memory, so that a little less of it takes longer; far less does not."""
    product = op("aten.mm.default", (tensor((64, 64), 0), tensor((64, 64), 1)), tensor((64, 64), 2))
    efficiency = {
        "matrix/memory": (EfficiencyPoint(bound_seconds=1e-9, ratio=1.5),),
        "matrix/compute": (EfficiencyPoint(bound_seconds=1e-9, ratio=3.0),),
    }

    def expected(memory, compute):
        return expected_seconds(product, cost_of(product), (memory, 0.0, compute, 0.0), efficiency)

    assert expected(1.0, 0.8) == pytest.approx(2.4)
    assert expected(1.0, 0.4) == pytest.approx(1.5)
    assert expected(0.8, 1.0) == pytest.approx(3.0)


def on_a_cpu(**launch):
    achievable = Achievable(
        how="measured", note="made up", bandwidth=1e9, matrix={}, vector={"float32": 1e12}, launch=LaunchCost(**launch)
    )
    machine = Machine(
        id="cpu",
        name="CPU",
        kind="cpu",
        vendor="x",
        architecture="x",
        processors=1,
        memory_bytes=1e9,
        achievable=achievable,
    )
    return with_efficiency(machine, pointwise=(EfficiencyPoint(bound_seconds=1e-9, ratio=2.0),))


def test_a_call_on_a_cpu_starts_once_with_cold_caches(addition):
    warm, cold = estimate_trace(addition, on_a_cpu()), estimate_trace(addition, on_a_cpu(cold_start=0.25))
    assert cold.expected_s == pytest.approx(warm.expected_s + 0.25)
    assert cold.ops[0].expected_seconds == warm.ops[0].expected_seconds
    nothing = dataclasses.replace(addition, ops=())
    assert estimate_trace(nothing, on_a_cpu(cold_start=0.25)).expected_s == 0.0


def test_no_op_on_a_cpu_takes_less_than_its_call(addition):
    view = Op(
        name="aten.view.default",
        arguments={"self": tensor((2**26,), 0), "size": [2**13, 2**13]},
        outputs=(tensor((2**13, 2**13), 0),),
    )
    viewed = dataclasses.replace(addition, ops=(view, *addition.ops))
    found = estimate_trace(viewed, on_a_cpu(host_call=3e-6))
    assert found.ops[0].expected_seconds == 3e-6
    assert found.ops[0].seconds == 0.0
    assert found.ops[1].expected_seconds == estimate_trace(addition, on_a_cpu()).ops[0].expected_seconds


@pytest.fixture
def addition():
    size = 2**26
    tensors = [tensor((size,), number) for number in range(3)]
    storages = {number: Storage(bytes=2.0 * size, kind="input") for number in range(2)}
    storages[2] = Storage(bytes=2.0 * size, kind="intermediate")
    made = op("aten.add.Tensor", tensors[:2], tensors[2])
    return Trace(ops=(made,), storages=storages, results=frozenset({2}))


def with_efficiency(machine, **points):
    return dataclasses.replace(machine, achievable=dataclasses.replace(machine.achievable, efficiency=points))


def test_a_machine_that_was_measured_is_taken_at_its_own_figures(addition):
    machine = with_efficiency(on_a_cpu(), pointwise=(EfficiencyPoint(bound_seconds=1e-6, ratio=3.0),))
    found = estimate_trace(addition, machine)
    assert found.expected_s == found.expected_device_s == pytest.approx(3 * found.as_written_s)
    assert found.expected_from == "cpu"


def test_a_cpu_that_was_not_is_taken_at_those_of_the_reference(addition):
    found = estimate_trace(addition, with_efficiency(on_a_cpu()))
    assert found.expected_from == reference_efficiency().machine
    assert 1.0 <= found.expected_s / found.as_written_s < 4.0


def test_a_gpu_has_models_that_were_fitted_to_another(addition):
    found = estimate_trace(addition, catalogue.find("a100-sxm-80gb"))
    assert found.expected_from == "h200-sxm"
    assert 1.0 <= found.expected_s / found.as_written_s < 2.0


def test_the_ceilings_of_the_bound_do_not_change_what_is_expected(addition):
    machine = catalogue.find("h200-sxm")
    bound = estimate_trace(addition, machine, ceilings="theoretical")
    assert bound.expected_s == estimate_trace(addition, machine).expected_s
    assert bound.as_written_s < bound.expected_s


def test_what_is_like_nothing_that_was_measured_is_not_known(addition):
    machine = with_efficiency(on_a_cpu(), sorting=POINTS)
    found = estimate_trace(addition, machine)
    assert found.ops[0].expected_seconds is None
    assert found.expected_s is None


@pytest.mark.parametrize(
    ("name", "more", "per_element"),
    [
        ("aten.gelu_backward.default", {"approximate": "none"}, 2e-8),
        ("aten.gelu_backward.default", {"approximate": "tanh"}, 4e-8),
        ("aten.exp.default", {}, None),  # its rate was not measured
        ("aten.add.Tensor", {}, None),
    ],
)
def test_arithmetic_with_transcendental_functions_takes_its_time_and_no_bound_has_it(name, more, per_element):
    x, gradient, out = (tensor((1024, 1024), storage, dtype="float32") for storage in range(3))
    operation = Op(name=name, arguments={"grad_output": gradient, "self": x, **more}, outputs=(out,))
    storages = {storage: Storage(bytes=4 * 2**20, kind="input") for storage in range(3)}
    trace = Trace(ops=(operation,), storages=storages, results=frozenset({2}))
    before = slow_cpu()
    rates = {
        f"transcendental.{kernel}": Ceiling(value=rate, spread=0.0, how="made up")
        for kernel, rate in (("gelu_backward", 5e7), ("gelu_backward_tanh", 2.5e7))
    }
    achievable = dataclasses.replace(before.achievable, ceilings={**before.achievable.ceilings, **rates})
    after = dataclasses.replace(before, achievable=achievable)
    old, new = (estimate_trace(trace, machine).ops[0] for machine in (before, after))
    assert new.seconds == old.seconds
    assert new.expected_seconds == pytest.approx(old.expected_seconds if per_element is None else 2**20 * per_element)
    assert new.expected_seconds >= old.expected_seconds
