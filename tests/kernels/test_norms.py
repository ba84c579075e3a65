"""RMSNorm and LayerNorm, alone and after an addition: values, gradients, layouts, and all ways to launch them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")

from nearpeak.kernels import norms as operations
from nearpeak.kernels._runtime.ring_buffer import RingConfig
from nearpeak.kernels._runtime.row_barrier import SplitConfig
from nearpeak.kernels._runtime.strided_rows import strided_rows
from nearpeak.kernels.norms import triton as norms_triton
from nearpeak.kernels.norms import tuning
from nearpeak.kernels.norms.tuning import ApartConfig, BackwardTileConfig, ForwardTileConfig, GroupConfig

BF16 = torch.bfloat16
SPLIT = SplitConfig(steps=2, warps=1, part=100)
TILE = BackwardTileConfig(rows=2, warps=4, stages=1, programs=1)
APART = ApartConfig(warps=1, elements=4)
GROUPS = GroupConfig(block=256, warps=4, stages=1, programs=1, ahead=False, hints=True, batch=1)


@pytest.fixture(autouse=True)
def seeded_and_required():
    torch.manual_seed(0)
    with kernels.using("require"):
        yield


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rms(x, weight, bias, function=kernels.rms_norm):
    return function(x, weight, bias=bias, offset=0.5)


def rms_reference(x, weight, bias):
    return rms(x, weight, bias, kernels.rms_norm.reference)


def both(function):
    """Both results of a function as one tensor, so that gradients come to both."""
    return lambda *args: torch.cat([one.to(args[1].dtype) for one in function(*args)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 64), (1030,)], ids=str)
def test_norms_are_exact(shape, dtype):
    x, weight, bias = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype), randn(shape[-1], dtype=dtype)
    assert_kernel_is_exact(rms, rms_reference, [x, weight, bias])
    assert_kernel_is_exact(kernels.layer_norm, kernels.layer_norm.reference, [x, weight, bias])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [kernels.add_rms_norm, kernels.add_layer_norm], ids=lambda one: one.__name__)
def test_norms_after_an_addition_are_exact(function, dtype):
    x, residual, weight = randn(3, 4, 70, dtype=dtype), randn(3, 4, 70, dtype=dtype), randn(70, dtype=dtype)
    assert_kernel_is_exact(both(function), both(function.reference), [x, residual, weight])


@pytest.mark.parametrize("function", [kernels.add_rms_norm, kernels.add_layer_norm], ids=lambda one: one.__name__)
def test_the_sum_is_what_torch_adds_and_its_norm_that_of_the_sum(function):
    x, residual, weight = randn(9, 96, dtype=BF16), randn(9, 96, dtype=BF16), randn(96, dtype=BF16)
    result, total = function(x, residual, weight)
    apart = kernels.rms_norm if function is kernels.add_rms_norm else kernels.layer_norm
    assert torch.equal(total, x + residual)
    assert torch.equal(result, apart(x + residual, weight))


@pytest.mark.parametrize(("x_dtype", "residual_dtype"), [(BF16, torch.float32), (torch.float32, BF16)], ids=str)
def test_a_residual_of_another_dtype(x_dtype, residual_dtype):
    inputs = [randn(6, 40, dtype=x_dtype), randn(6, 40, dtype=residual_dtype), randn(40)]
    result, total = kernels.add_rms_norm(*inputs)
    assert (result.dtype, total.dtype) == (x_dtype, residual_dtype)
    upstream = randn(6, 40), randn(6, 40)

    def gradients(function, inputs):
        leaves = [one.detach().requires_grad_() for one in inputs]
        results = function(*leaves)
        return torch.autograd.grad(results, leaves, [g.to(r.dtype) for g, r in zip(upstream, results, strict=True)])

    actual = gradients(kernels.add_rms_norm, inputs)
    low = gradients(kernels.add_rms_norm.reference, inputs)
    for one, other in zip(actual, low, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
    if x_dtype == BF16:  # the gradients of x and residual are one, rounded differently
        assert torch.equal(actual[0], actual[1].to(BF16))


def test_only_one_of_two_results_is_used():
    leaves = [randn(4, 24).requires_grad_() for _ in range(2)] + [randn(24).requires_grad_()]
    for index in (0, 1):
        actual = torch.autograd.grad(kernels.add_rms_norm(*leaves)[index].sum(), leaves, allow_unused=True)
        expected = torch.autograd.grad(kernels.add_rms_norm.reference(*leaves)[index].sum(), leaves, allow_unused=True)
        for one, other in zip(actual, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)


def test_float32_weights_for_bfloat16():
    x, weight, bias = randn(7, 80, dtype=BF16), randn(80), randn(80)
    assert kernels.layer_norm(x, weight, bias).dtype == BF16
    assert_kernel_is_exact(kernels.layer_norm, kernels.layer_norm.reference, [x, weight, bias])
    assert_kernel_is_exact(rms, rms_reference, [x, weight, bias])


def test_without_weights():
    x = randn(5, 48)
    assert_kernel_is_exact(kernels.rms_norm, kernels.rms_norm.reference, [x])
    assert_kernel_is_exact(kernels.layer_norm, kernels.layer_norm.reference, [x])


def test_rows_of_norm_one_and_mean_zero():
    x = randn(6, 300) * 100 + 1000
    torch.testing.assert_close(kernels.rms_norm(x).square().mean(-1), torch.ones(6, device=DEVICE))
    result = kernels.layer_norm(x)
    torch.testing.assert_close(result.mean(-1), torch.zeros(6, device=DEVICE), atol=1e-4, rtol=0.0)
    torch.testing.assert_close(result.square().mean(-1), torch.ones(6, device=DEVICE), atol=1e-4, rtol=0.0)
    same = torch.full((3, 65), 7.0, device=DEVICE)
    assert not kernels.layer_norm(same).any()
    assert not norms_triton.layer_norm(same, None, None, 1e-5, config=replace(SPLIT, part=24))[0].any()
    assert not kernels.rms_norm(torch.zeros(3, 65, device=DEVICE)).any()


def test_a_row_with_a_nan_spoils_no_other():
    x = randn(5, 33)
    x[2, 4] = float("nan")
    for function in (kernels.rms_norm, kernels.layer_norm):
        assert torch.equal(function(x).isnan().all(-1), torch.arange(5, device=DEVICE) == 2)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 4), (4, 1)], ids=str)
def test_empty_and_of_one_column(shape):
    x, weight, bias = (one.requires_grad_() for one in (randn(*shape), randn(shape[-1]), randn(shape[-1])))
    for function in (rms, kernels.layer_norm):
        reference = rms_reference if function is rms else kernels.layer_norm.reference
        actual, expected = function(x, weight, bias), reference(x, weight, bias)
        torch.testing.assert_close(actual, expected)
        if x.numel():  # the reference has no gradients of nothing
            expected = torch.autograd.grad(expected.sum(), (x, weight, bias))
        else:
            expected = (torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias))
        # the gradient of one column is a difference of equal numbers, times 1 / sqrt(eps)
        gradients = torch.autograd.grad(actual.sum(), (x, weight, bias))
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("function", [rms, kernels.layer_norm], ids=["rms_norm", "layer_norm"])
def test_any_layout_of_input_and_gradient(function):
    x, upstream = randn(3, 2, 10), randn(3, 2, 10)
    weight, bias = randn(10), randn(10)

    def gradients(x, upstream):
        leaves = [one.detach().requires_grad_() for one in (x, weight, bias)]
        result = function(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]

    expected = gradients(x, upstream)
    for (name, one), (other_name, other) in itertools.product(layouts(x), layouts(upstream)):
        for actual, wanted in zip(gradients(one, other), expected, strict=True):
            assert torch.equal(actual, wanted), (name, other_name)
    expanded = upstream[:1, :1, :1].expand(3, 2, 10)
    for actual, wanted in zip(gradients(x, expanded), gradients(x, expanded.contiguous()), strict=True):
        assert torch.equal(actual, wanted)


def test_heads_are_read_where_they_are():
    heads = randn(2, 5, 3 * 4, 16)[:, :, 4:8]  # the keys in a fused projection of [batch, position, head, dimension]
    moved = randn(2, 4, 5, 16).transpose(1, 2)
    strided = strided_rows(heads, moved)
    assert strided.tensors[0] is heads
    assert strided.tensors[1] is moved
    assert strided.levels == 3
    assert torch.equal(kernels.rms_norm(heads), kernels.rms_norm(heads.contiguous()))
    assert torch.equal(kernels.rms_norm(moved), kernels.rms_norm(moved.contiguous()))
    result, total = kernels.add_layer_norm(heads, moved)
    assert torch.equal(total, heads + moved)
    assert torch.equal(result, kernels.layer_norm(heads + moved))


def test_more_strides_than_three_are_copied():
    x = randn(2, 3, 2, 3, 8).permute(3, 0, 2, 1, 4)
    assert strided_rows(x).tensors[0].is_contiguous()
    assert torch.equal(kernels.layer_norm(x), kernels.layer_norm(x.contiguous()))


@pytest.mark.slow
@pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize("columns", [500, 64])
def test_long_rows(columns, centered):
    """The parts of a row, forward and backward, made small enough to be tested."""
    x, residual, gradient, sum_gradient = (randn(6, columns) + 3 for _ in range(4))
    weight, bias = randn(columns), randn(columns)
    arguments = weight, bias, 1e-5, 0.5, centered
    result, total, statistics = norms_triton._forward(x, residual, *arguments, SPLIT)
    assert torch.equal(total, x + residual)
    exact = operations.norm_reference(total.double(), weight, bias, 1e-5, 0.5, centered, torch.float64)
    low = operations.norm_reference(total, *arguments, torch.float32)
    assert_as_exact(result, exact, low)
    torch.testing.assert_close(statistics, operations.row_statistics(total, 1e-5, centered))
    assert torch.equal(norms_triton._forward(total, None, *arguments, SPLIT)[0], result)
    for config in (replace(SPLIT, part=2048), replace(SPLIT, part=2048, kept=True), replace(SPLIT, kept=True)):
        again = norms_triton._forward(total, None, *arguments, config)
        assert_as_exact(again[0], exact, low)
        torch.testing.assert_close(again[2], statistics)
        assert torch.equal(norms_triton._forward(x, residual, *arguments, config)[0], again[0])
    given = gradient, total, sum_gradient, statistics, weight, bias, 0.5, centered, [True] * 4
    expected = operations._norm_backward_reference(*(one.double() if torch.is_tensor(one) else one for one in given))
    for config in (replace(GROUPS, rows=2, block=512, batch=4), replace(GROUPS, block=4096), TILE, APART):
        actual = norms_triton.norm_backward(*given, config=config)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("rows_of_tile", "ahead"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize(("rows", "columns", "block"), [(1, 200, 64), (11, 100, 64), (11, 100, 128), (8, 256, 128)])
def test_rows_are_shared_by_programs(rows, columns, block, rows_of_tile, ahead, monkeypatch):
    """Several groups, batches and parts that do not divide what they are of, and one part, which waits for nobody."""
    monkeypatch.setattr(norms_triton, "processors", lambda _: 4)
    config = replace(GROUPS, block=2 * block, batch=3, rows=rows_of_tile, ahead=ahead)
    x, sum_gradient = randn(rows, columns) + 1, randn(rows, columns)
    weight, bias = randn(columns), randn(columns)
    expanded, transposed = randn(columns).expand(rows, columns), randn(columns, rows).t()
    plan = norms_triton.plan_groups(rows, columns, 4, 4, config)
    assert plan.parts == -(-columns // block)
    assert (plan.groups > 1) == (rows > 1)
    for centered in (False, True):
        statistics = operations.row_statistics(x, 1e-5, centered)
        for inputs in (
            (transposed, x, sum_gradient, statistics, weight, bias, 0.5, centered, [True] * 4),
            (expanded, x, None, statistics, None, bias, 0.0, centered, [True, False, False, True]),
        ):
            exact = (one.double() if torch.is_tensor(one) else one for one in inputs)
            expected = operations._norm_backward_reference(*exact)
            actual = norms_triton.norm_backward(*inputs, config=config)
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def test_how_rows_are_shared():
    config = tuning.backward_heuristic(65536)
    plan = norms_triton.plan_groups(2048, 65536, 2, 132, config)
    assert (plan.block, plan.parts, plan.groups, plan.batch, plan.registers) == (8192, 8, 32, 2, 64)
    few = norms_triton.plan_groups(5, 65536, 2, 132, config)
    assert (few.groups, few.batch) == (5, 1)
    wide = norms_triton.plan_groups(1024, 524288, 2, 132, config)
    assert (wide.block, wide.warps, wide.parts, wide.waits) == (16384, 32, 32, True)
    assert not norms_triton.plan_groups(8, 2**20, 2, 132, config).waits
    # a part of a GPU: all programs of a group can run at the same time
    assert not norms_triton.plan_groups(2048, 262144, 2, 14, config).waits
    assert norms_triton.plan_groups(2048, 65536, 4, 132, config).block == 4096


@pytest.mark.parametrize("config", [TILE, APART, replace(GROUPS, block=64, batch=2)], ids=lambda config: config.variant)
def test_gradients_only_of_what_wants_them(config):
    x, gradient, weight, bias = randn(5, 96), randn(5, 96), randn(96), randn(96)
    statistics = operations.row_statistics(x, 1e-5, True)
    given = gradient, x, None, statistics, weight, bias, 0.0, True
    every = norms_triton.norm_backward(*given, [True] * 4, config=config)
    for wants in ([True, False, False, False], [False, True, False, True], [False, False, True, False], [False] * 4):
        some = norms_triton.norm_backward(*given, wants, config=config)
        for one, other, wanted in zip(some, every, wants, strict=True):
            assert torch.equal(one, other) if wanted else not one.numel()


def test_a_frozen_weight_costs_nothing(monkeypatch):
    launched = []
    launch = norms_triton.launch
    monkeypatch.setattr(
        norms_triton,
        "launch",
        lambda kernel, *args, **settings: launched.append(kernel) or launch(kernel, *args, **settings),
    )
    x, weight = randn(3, 16).requires_grad_(), randn(16)
    kernels.rms_norm(x, weight).sum().backward()
    assert launched == [norms_triton.forward_tile, norms_triton.backward_apart]


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=3),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
)
def test_any_shape_and_option(lead, columns, dtype, has_weight, has_bias, offset):
    x = randn(*lead, columns, dtype=dtype)
    weight = randn(columns) if has_weight else None
    bias = randn(columns, dtype=dtype) if has_bias else None
    pairs = [
        (kernels.rms_norm(x, weight, bias=bias, offset=offset), rms_in_float64(x, weight, bias, offset)),
        (kernels.layer_norm(x, weight, bias), kernels.layer_norm.reference(x.double(), *doubled(weight, bias))),
    ]
    for actual, exact in pairs:
        assert actual.dtype == dtype
        assert actual.is_contiguous()
        torch.testing.assert_close(actual.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def doubled(*tensors):
    return [None if one is None else one.double() for one in tensors]


def rms_in_float64(x, weight, bias, offset):
    weight, bias = doubled(weight, bias)
    return kernels.rms_norm.reference(x.double(), weight, bias=bias, offset=offset)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("tile", ForwardTileConfig(rows=1, warps=4, programs=1)),
        ("split", SPLIT),
        ("apart", ForwardTileConfig(rows=2, warps=4)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_more_elements_than_32_bits_can_count(name, config):
    """Rows that are further apart than 2**31 elements: of memory that is reserved and not touched."""
    columns, stride = 8, 2**30 + 8
    reserved = torch.empty(2 * stride + columns, dtype=BF16) if DEVICE == "cpu" else None
    if reserved is None:
        reserved = torch.empty(2 * stride + columns, dtype=BF16, device=DEVICE)
    x = reserved.as_strided((3, columns), (stride, 1))
    x.copy_(randn(3, columns))
    result, _, statistics = norms_triton._forward(x, None, None, None, 1e-6, 0.0, False, config)
    assert torch.equal(result, kernels.rms_norm(x.contiguous()))
    backward = replace(GROUPS, block=8) if name == "split" else APART if name == "apart" else TILE
    given = statistics, None, None, 0.0, False, [True, False, False, False]
    actual = norms_triton.norm_backward(x, x, x, *given, config=backward)[0]
    near = x.contiguous()
    assert torch.equal(actual, norms_triton.norm_backward(near, near, near, *given, config=backward)[0])


@pytest.mark.slow
def test_operators_are_of_torch():
    x, residual, weight, bias = (one.requires_grad_() for one in (randn(3, 5), randn(3, 5), randn(5), randn(5)))
    opcheck(torch.ops.nearpeak.rms_norm.default, (x, weight, None, 1e-6, 1.0))
    opcheck(torch.ops.nearpeak.layer_norm.default, (x, weight, bias, 1e-5))
    opcheck(torch.ops.nearpeak.add_rms_norm.default, (x, residual, weight, None, 1e-6, 0.0))
    opcheck(torch.ops.nearpeak.add_layer_norm.default, (x, residual, weight, bias, 1e-5))
    statistics = operations.row_statistics(x, 1e-5, True).detach()
    plain = [one.detach() for one in (x, residual, weight, bias)]
    for wants in ([True] * 4, [True, False, False, False], [False, False, True, False]):
        opcheck(
            torch.ops.nearpeak.norm_backward.default,
            (plain[0].t().contiguous().t(), plain[1], plain[0], statistics, *plain[2:], 0.0, True, wants),
        )


def test_it_compiles_without_a_graph_break():
    x, residual, weight = (one.requires_grad_() for one in (randn(3, 5), randn(3, 5), randn(5)))

    def model(x, residual, weight):
        result, total = kernels.add_rms_norm(x, residual, weight)
        return (kernels.layer_norm(result, weight) * total.exp()).sum()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x, residual, weight), (x, residual, weight))
    torch.testing.assert_close(actual, torch.autograd.grad(model(x, residual, weight), (x, residual, weight)))


def test_references_have_derivatives_of_any_order():
    inputs = [torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with kernels.using("off"):
        assert torch.autograd.gradcheck(kernels.add_layer_norm, (*inputs, weight, bias))
        assert torch.autograd.gradcheck(kernels.add_rms_norm, (*inputs, weight))
        assert torch.autograd.gradgradcheck(kernels.rms_norm, (inputs[0], weight))


def test_the_operators_own_reference(monkeypatch):
    """Called by name with float64, which kernels do not take, forward or backward."""
    monkeypatch.setattr(operations.norm_backward, "_launcher", lambda *_: pytest.fail("a kernel ran"))
    x, weight, bias, gradient = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 6), (6,), (6,), (3, 6)))
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    actual = torch.autograd.grad(torch.ops.nearpeak.layer_norm(*leaves, 1e-5)[0], leaves, gradient)
    expected = torch.autograd.grad(kernels.layer_norm.reference(*leaves), leaves, gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # by statistics in float32


def test_modules_take_the_state_of_those_of_torch():
    x = randn(3, 24)
    for ours, theirs in ((kernels.RMSNorm, torch.nn.RMSNorm), (kernels.LayerNorm, torch.nn.LayerNorm)):
        module, other = ours(24, eps=1e-5).to(DEVICE), theirs(24, eps=1e-5).to(DEVICE)
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter)
        module.load_state_dict(other.state_dict())
        torch.testing.assert_close(module(x), other(x))
    assert torch.equal(kernels.RMSNorm(24, offset=1.0).to(DEVICE)(x), kernels.RMSNorm(24).to(DEVICE)(x))
    assert kernels.LayerNorm(24, bias=False).bias is None


def test_mistakes_are_named():
    x = randn(3, 8)
    with pytest.raises(UsageError, match=r"weight of a norm has a number for each of the 8 columns.*\(7,\)"):
        kernels.rms_norm(x, randn(7))
    with pytest.raises(UsageError, match="residual has the shape of x"):
        kernels.add_layer_norm(x, randn(8))
    with pytest.raises(UsageError, match="one dimension or more"):
        kernels.layer_norm(torch.tensor(1.0, device=DEVICE))
    with pytest.raises(UsageError, match=r"int64"), kernels.using("off"):
        kernels.layer_norm(torch.ones(3, dtype=torch.int64))
    with pytest.raises(KernelUnavailable, match=r"rms_norm cannot run: .*float64"):
        kernels.rms_norm(x.double())


@pytest.mark.parametrize("size", [1, 64, 4096, 16384, 32768, 65536, 262144])
def test_heuristics_are_among_what_can_be_launched(size):
    assert 4 <= len(tuning.forward_candidates(size)) <= 40
    assert type(tuning.forward_heuristic(size, 4096, 132)) in map(type, tuning.forward_candidates(size))
    for centered, added in itertools.product((False, True), repeat=2):
        candidates = tuning.backward_candidates(size, centered=centered, added=added)
        assert 4 <= len(candidates) <= 40
        assert type(tuning.backward_heuristic(size, centered=centered)) in map(type, candidates)


@pytest.mark.parametrize(("rows", "columns"), [(40, 128), (317, 512), (253, 1280), (333, 7000)], ids=str)
def test_few_rows_are_spread_over_all_multiprocessors(rows, columns):
    config = tuning.forward_heuristic(columns, rows, 132)
    assert config.rows == 1
    threads = 32 * config.warps
    assert columns <= 16 * threads, "no thread has more than two loads"
    assert 8 * threads <= max(2 * columns, 256), "and few have none"


@pytest.mark.parametrize("centered", [False, True])
def test_few_rows_have_a_program_each_in_backward_passes(centered, monkeypatch):
    monkeypatch.setattr(tuning, "tuned_by_rows", lambda *place: None)  # where nothing was measured

    def config(rows, columns):
        return tuning.backward_config(columns, rows, torch.device("cpu"), centered=centered, added=False)

    for columns in (200, 2176, 6096, 8192):
        few = config(122, columns)
        assert few == config(41, columns) != config(4096, columns)
        assert isinstance(few, ApartConfig)
        assert columns <= 16 * 32 * few.warps
        assert few in tuning.few_backward_candidates(columns)
    assert config(41, 16384) == config(4096, 16384), "too long for its sums in the registers of one program"


@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (3, 20), (37, 100), (70, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_few_rows_take_one_launch(rows, columns, dtype, monkeypatch):
    """Sums over more rows than a tile has, in more columns, of gradients with strides of their own."""
    launched = []
    launch = norms_triton.launch
    monkeypatch.setattr(
        norms_triton, "launch", lambda kernel, *args, **given: launched.append(kernel) or launch(kernel, *args, **given)
    )
    x, sum_gradient = randn(rows, columns, dtype=dtype), randn(rows, 2 * columns, dtype=dtype)[:, ::2]
    gradient = randn(columns, rows, dtype=dtype).t()
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    for centered, added in itertools.product((False, True), repeat=2):
        statistics = operations.row_statistics(x, 1e-5, centered)
        given = (
            gradient, x, sum_gradient if added else None, statistics, weight, bias, 0.0 if centered else 0.5, centered,
            [True, added, True, True],
        )  # fmt: skip
        exact = operations._norm_backward_reference(*(one.double() if torch.is_tensor(one) else one for one in given))
        low = operations._norm_backward_reference(*given)
        for elements in (4, 32):
            launched.clear()
            actual = norms_triton.norm_backward(*given, config=replace(APART, elements=elements))
            assert launched == [norms_triton.backward_apart]
            for one, other, rough in zip(actual, exact, low, strict=True):
                assert_as_exact(one, other, rough)


def test_sums_over_few_rows_read_most_of_them_at_once():
    config = ApartConfig(warps=8, elements=16)
    assert tuning.column_tile(config, 20, 4160) == (32, 128)
    assert tuning.column_tile(config, 264, 6096) == (256, 16)
    assert tuning.column_tile(config, 3, 64) == (4, 64)
    assert tuning.column_tile(config, 1, 3) == (1, 16)


@pytest.mark.parametrize("columns", [128, 384, 1024, 1536, 8192])
def test_a_warp_of_many_rows_has_its_loads_in_flight(columns):
    config = tuning.forward_heuristic(columns, 10**6, 132)
    assert config.rows * config.warps >= 1
    assert 16 * 32 * config.warps < config.rows * columns <= 32 * 32 * config.warps


def test_a_measured_tile_holds_for_many_rows_that_fill_its_block():
    def config(rows, columns):
        device = torch.device("cpu")
        return tuning.forward_config(columns, rows, device, centered=False, added=True)

    measured = ForwardTileConfig(rows=2, warps=32)
    assert config(16384, 4096) == config(16384, 4000) == measured
    assert config(300, 4096).rows == config(16384, 2816).rows == 1


def test_the_weight_is_read_with_the_rows_where_that_takes_few_registers():
    tile = ForwardTileConfig(rows=1, warps=4)
    assert tuning.reads_early(tile, 1024, 10**6, 132), "8 elements of a thread"
    assert tuning.reads_early(tile, 4096, 300, 132), "few programs"
    assert not tuning.reads_early(tile, 4096, 10**6, 132)
    assert tuning.reads_early(replace(tile, early=True), 4096, 10**6, 132)
    assert not tuning.reads_early(replace(tile, early=False), 1024, 300, 132)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_rows_between_measured_lengths_are_in_rings_in_backward_passes(centered, added):
    for size in (16384 + 128, 26880, 65536 + 128):
        config = tuning.backward_config(size, 8192, torch.device("cpu"), centered=centered, added=added)
        assert isinstance(config, RingConfig)


def test_masks_leave_registers_for_fewer_programs():
    full, masked = (tuning.backward_heuristic(size, centered=True) for size in (2048, 1536))
    assert (masked.rows, masked.warps) == (full.rows, full.warps) == (1, 4)
    assert masked.programs < full.programs


@pytest.mark.parametrize("centered", [False, True])
def test_rows_ahead_fit_into_shared_memory(centered):
    ahead = {}
    for size in (*range(8, 4096, 56), *range(4096, 16385, 512)):
        config, block = tuning.backward_heuristic(size, centered=centered), 1 << (size - 1).bit_length()
        if isinstance(config, BackwardTileConfig):
            # of three tensors, after an addition, and of the weight
            copied = (config.stages - 1) * 2 * (3 * config.rows * block + block)
            ahead[size] = config.stages > 1
            assert config.programs * copied <= 220 * 2**10
    assert ahead[1520]
    assert not ahead[64]


@pytest.mark.parametrize(("shape", "width"), [((3, 5656), 8), ((3, 4724), 4), ((3, 4096), 16), ((3, 7), 1)], ids=str)
def test_the_width_of_loads_follows_from_sizes_and_strides(shape, width):
    x = torch.empty(shape)
    assert strided_rows(x, x).width == width
    wide = torch.empty(shape[0], shape[1] + 6)[:, : shape[1]]  # rows end as before, and start elsewhere
    assert strided_rows(x, wide).width == min(width, 2 if shape[1] % 2 == 0 else 1)


SIZES = [(32768 * 8, 128), (32768, 1024), (16384, 4096), (4096, 16384), (2048, 65536), (1024, 262144)]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), SIZES, ids=str)
def test_full_sizes_are_exact_and_the_same_in_every_run(rows, columns):
    rows //= 4  # float64 beside it
    x, residual, upstream = (randn(rows, columns, dtype=BF16) for _ in range(3))
    weight = randn(columns, dtype=BF16)
    function = kernels.add_rms_norm
    assert_kernel_is_exact(
        lambda *args: function(*args)[0], lambda *args: function.reference(*args)[0], [x, residual, weight]
    )
    leaves = [one.requires_grad_() for one in (x, residual, weight)]
    first = None
    for _ in range(100):
        results = function(*leaves)
        tensors = [*results, *torch.autograd.grad(results, leaves, [upstream, upstream])]
        first = first or tensors
        assert all(map(torch.equal, tensors, first))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 1000, 4096, 16384, 65536, 262144])
def test_every_candidate_is_right(size):
    x, gradient = (randn(2**22 // size + 3, size, dtype=BF16) for _ in range(2))
    weight, bias = randn(size, dtype=BF16), randn(size, dtype=BF16)
    expected = operations.norm_reference(x, weight, bias, 1e-5, 0.0, True, BF16)
    expected_statistics = operations.row_statistics(x, 1e-5, True)
    for config in tuning.forward_candidates(size):
        actual, statistics = norms_triton.layer_norm(x, weight, bias, 1e-5, config=config)
        torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=1e-5, msg=str(config))
        torch.testing.assert_close(statistics, expected_statistics, rtol=1e-4, atol=1e-5, msg=str(config))
    for number, (centered, added) in enumerate(itertools.product((False, True), repeat=2)):
        statistics = operations.row_statistics(x, 1e-5, centered)
        given = (
            gradient,
            x,
            x if added else None,
            statistics,
            weight,
            bias,
            0.0,
            centered,
            [True, added, True, centered],
        )
        expected = operations._norm_backward_reference(
            *(one.double() if torch.is_tensor(one) else one for one in given)
        )
        candidates = tuning.backward_candidates(size, centered=centered, added=added)
        for config in candidates[number::4]:  # all of them take minutes
            for one, other in zip(norms_triton.norm_backward(*given, config=config), expected, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1.6e-2, atol=1e-2, msg=str(config))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [4096, 65536])
def test_in_a_cuda_graph(columns):
    x, gradient, weight = randn(512, columns, dtype=BF16), randn(512, columns, dtype=BF16), randn(columns, dtype=BF16)
    leaves = [one.requires_grad_() for one in (x, weight)]

    def step():
        return torch.autograd.grad(kernels.rms_norm(*leaves), leaves, gradient)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensors = step()
    with torch.no_grad():
        x.copy_(randn(512, columns))
    graph.replay()
    assert all(map(torch.equal, tensors, step()))


@pytest.mark.gpu
def test_compiled_by_inductor():
    x, residual, weight = randn(64, 512, dtype=BF16), randn(64, 512, dtype=BF16), randn(512, dtype=BF16)
    leaves = [one.requires_grad_() for one in (x, residual, weight)]

    def model(x, residual, weight):
        result, total = kernels.add_rms_norm(x * 2, residual, weight)
        return result.float().square().sum() + total.float().sum()

    compiled = torch.compile(model, fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(model(*leaves), leaves), rtol=2e-2, atol=1e-2)
