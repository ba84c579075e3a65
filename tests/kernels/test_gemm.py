"""`product`: the matrix product and what follows it, in one kernel."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")
REFERENCE = kernels.gemm.reference  # and the operators are there
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's own product on this CPU
ACTIVATIONS = [None, "gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
E4M3 = torch.float8_e4m3fn


def made(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def both(**options):
    """The kernel and the reference, with tensors that can have gradients in their places: x, weight, bias, residual."""

    def call(function, x, weight, *rest):
        names = [name for name in ("bias", "residual") if options.get(name)]
        fixed = {name: value for name, value in options.items() if name not in ("bias", "residual")}
        return function(x, weight, **dict(zip(names, rest, strict=True)), **fixed)

    return partial(call, kernels.gemm), partial(call, kernels.gemm.reference)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, activation):
    x, weight, bias = made(33, 40, dtype=dtype), made(50, 40, dtype=dtype, seed=1), made(50, dtype=dtype, seed=2)
    with kernels.using("require"):
        by_exp = activation not in (None, "relu", "relu_squared")
        assert_kernel_is_exact(*both(activation=activation), [x, weight], by_exp=by_exp)
        inputs = [x, weight, bias, made(33, 50, dtype=dtype, seed=3)]
        assert_kernel_is_exact(*both(activation=activation, bias=True, residual=True), inputs, by_exp=by_exp)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated(dtype, activation):
    x, weight = made(3, 7, 19, dtype=dtype), made(46, 19, dtype=dtype, seed=1)
    bias, residual = made(46, dtype=dtype, seed=2), made(3, 7, 23, dtype=dtype, seed=3)
    with kernels.using("require"):
        assert kernels.gemm(x, weight, activation=activation, gated=True).shape == (3, 7, 23)
        options = {"activation": activation, "gated": True}
        assert_kernel_is_exact(*both(**options), [x, weight], by_exp=True)
        assert_kernel_is_exact(*both(bias=True, residual=True, **options), [x, weight, bias, residual], by_exp=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 300, 5), (200, 1, 3), (150, 140, 130)], ids=str)
def test_several_tiles_and_odd_sizes(shape):
    rows, columns, depth = shape
    for dtype in DTYPES:
        x, weight = made(rows, depth, dtype=dtype), made(columns, depth, dtype=dtype, seed=1)
        with kernels.using("require"):
            assert_kernel_is_exact(*both(), [x, weight])


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 4), max_size=2), st.integers(1, 20), st.integers(1, 20), st.sampled_from(DTYPES),
    st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans(), st.lists(st.integers(0, 4), min_size=4, max_size=4),
)  # fmt: skip
@settings(max_examples=15)
def test_any_shape_and_layout(batch, columns, depth, dtype, activation, gated, has_residual, ways):
    gated = gated and activation is not None
    shapes = [(*batch, depth), (columns * (1 + gated), depth), (*batch, columns), (*batch, columns)]
    tensors = [made(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    tensors = [list(layouts(one))[way % len(list(layouts(one)))][1] for one, way in zip(tensors, ways, strict=True)]
    inputs = tensors[: 3 if has_residual else 2]
    options = {"activation": activation, "gated": gated, "residual": has_residual}
    with kernels.using("require"):
        assert_kernel_is_exact(*both(**options), inputs, tensors[3], by_exp=True)


def test_expanded_tensors_and_gradients():
    x, weight, bias = made(1, 6).expand(5, 6), made(7, 1).expand(7, 6), made(1).expand(7)
    with kernels.using("require"):
        for upstream in (torch.ones((), device=DEVICE).expand(5, 7), made(5, 1).expand(5, 7), made(7).expand(5, 7)):
            inputs = [x, weight, bias, made(7).expand(5, 7)]
            assert_kernel_is_exact(*both(bias=True, residual=True), inputs, upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_beside_those_of_the_factors(dtype):
    x, weight = made(9, 20, dtype=dtype), made(8, 20, dtype=dtype, seed=1)
    bias, residual = made(8, seed=2), made(9, 8, seed=3)
    with kernels.using("require"):
        inputs = [x, weight, bias, residual]
        assert_kernel_is_exact(*both(bias=True, residual=True, activation="silu"), inputs, by_exp=True)
        result = kernels.gemm(x, weight, out_dtype=torch.float32)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, x.float() @ weight.float().T)  # not rounded to 16 bits on the way
        wide = both(activation="gelu", out_dtype=torch.float32)
        x.requires_grad_()
        for function in wide:
            assert torch.autograd.grad(function(x, weight).sum(), x)[0].dtype == dtype


def test_nothing_to_multiply():
    for rows, columns, depth in ((0, 4, 3), (3, 0, 4), (3, 4, 0)):
        x, weight, bias = (one.requires_grad_() for one in (made(rows, depth), made(columns, depth), made(columns)))
        with kernels.using("require"):
            found = kernels.gemm(x, weight, bias=bias, activation="gelu")
        expected = kernels.gemm.reference(x, weight, bias=bias, activation="gelu")
        torch.testing.assert_close(found, expected)
        for one, other in zip(
            *(torch.autograd.grad(y.sum(), (x, weight, bias)) for y in (found, expected)), strict=True
        ):
            torch.testing.assert_close(one, other)
    x = made(0, 5, 3)
    assert kernels.gemm(x, made(4, 3)).shape == (0, 5, 4)


def test_float32_keeps_what_rounding_takes():
    """Behind 2**24, rounding takes each 1 from a sum of float32."""
    x, weight = torch.zeros(3, 544, device=DEVICE), torch.ones(6, 544, device=DEVICE)
    x[:, 0] = 2**24
    x[:, 32::32] = 1
    with kernels.using("require"):
        assert kernels.gemm(x, weight).tolist() == [[2**24 + 16] * 6] * 3
        small = torch.zeros_like(weight[:3])
        small[:, 32] = 64  # silu leaves 64 as it is
        for factors in ((weight[:3], small), (small, weight[:3])):
            found = kernels.gemm(x, torch.cat(factors), activation="silu", gated=True)
            assert found.tolist() == [[64 * (2**24 + 16)] * 3] * 3


def test_what_is_infinite_stays_so():
    x, weight = made(6, 80), made(5, 80, seed=1).abs()
    x[0, 3], x[1, 70], x[2, 40] = float("inf"), float("-inf"), float("nan")
    x[3, 2], x[3, 60] = float("inf"), float("-inf")
    x[4, :] = torch.finfo(x.dtype).max
    weight[0, 7], weight[:, 8] = float("inf"), 2.0
    with kernels.using("require"):
        torch.testing.assert_close(kernels.gemm(x, weight), x @ weight.T, equal_nan=True)


def test_a_vector():
    with kernels.using("require"):
        assert_kernel_is_exact(*both(activation="silu"), [made(12), made(5, 12, seed=1)], by_exp=True)


def test_computed_again_in_the_backward_pass():
    inputs = [made(9, 20), made(8, 20, seed=1), made(8, seed=2)]
    with kernels.using("require"):
        for gated in (False, True):
            options = {"activation": "gelu", "gated": gated, "bias": True}
            assert_kernel_is_exact(both(recompute=True, **options)[0], both(**options)[1], inputs, by_exp=True)
    x, weight = inputs[0].requires_grad_(), inputs[1]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        kernels.gemm(x, weight, activation="gelu", recompute=True)
    assert all(one.data_ptr() in (x.data_ptr(), weight.data_ptr()) for one in saved)


def test_only_what_is_asked_for_gets_a_gradient():
    x, weight, bias, residual = made(4, 5), made(6, 5), made(6), made(4, 6)
    for chosen in (x, weight, bias, residual):
        chosen.requires_grad_()
        options = {"bias": bias, "residual": residual, "activation": "silu"}
        (found,) = torch.autograd.grad(kernels.gemm(x, weight, **options).sum(), chosen)
        (expected,) = torch.autograd.grad(kernels.gemm.reference(x, weight, **options).sum(), chosen)
        torch.testing.assert_close(found, expected)
        chosen.requires_grad_(False)


def test_rows_far_apart():
    """Rows so far from each other that 32 bits do not reach the second one: memory that is never touched but there."""
    apart = 2**31 + 64
    if DEVICE != "cpu" and torch.cuda.get_device_properties(0).total_memory < 2**34:
        pytest.skip("needs 8 GiB")
    memory = torch.empty(apart + 16, dtype=torch.bfloat16, device=DEVICE)
    x = memory.as_strided((2, 16), (apart, 1))
    x.copy_(made(2, 16))
    weight = made(3, 16, dtype=torch.bfloat16)
    with kernels.using("require"):
        torch.testing.assert_close(kernels.gemm(x, weight), x.contiguous() @ weight.T, atol=0.05, rtol=0.02)
        found = kernels.gemm(weight, x)
        torch.testing.assert_close(found, weight @ x.contiguous().T, atol=0.05, rtol=0.02)


def quantized(x, block):
    return kernels.quantize(x, block=block)


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks", [("tensor", "tensor"), ("row", "tensor"), ("row", "row"), ((1, 128), (128, 128))], ids=str
)
@pytest.mark.parametrize("shape", [(5, 20, 48), (33, 130, 300), (2, 260, 128)], ids=str)
def test_fp8(shape, blocks):
    rows, columns, depth = shape
    x, scale_x = quantized(made(rows, depth), blocks[0])
    weight, scale_weight = quantized(made(columns, depth, seed=1), blocks[1])
    wide = [kernels.dequantize(values, scale, block=block, dtype=torch.float32).double()
            for values, scale, block in ((x, scale_x, blocks[0]), (weight, scale_weight, blocks[1]))]  # fmt: skip
    exact = wide[0] @ wide[1].T
    scales = {"scale_x": scale_x, "scale_weight": scale_weight}
    with kernels.using("require"):
        for dtype in (torch.bfloat16, torch.float32):
            found = kernels.gemm(x, weight, out_dtype=dtype, **scales)
            assert_as_exact(found, exact, (wide[0].float() @ wide[1].float().T).to(dtype))
        bias, residual = made(columns, seed=2), made(rows, columns // 2, seed=3)
        options = {"bias": bias, "residual": residual, "activation": "silu", "gated": True, "out_dtype": torch.float32}
        found = kernels.gemm(x, weight, **options, **scales)
        expected = kernels.gemm.reference(x, weight, **options, **scales)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert kernels.gemm(x, weight, fast_accumulate=True, **scales).dtype == torch.bfloat16


def test_fp8_without_scales():
    x, weight = made(3, 32).to(E4M3), made(4, 32).to(E4M3)
    with kernels.using("require"):
        torch.testing.assert_close(kernels.gemm(x, weight, out_dtype=torch.float32), x.float() @ weight.float().T)


def test_fp8_has_no_derivatives_but_the_rest_has():
    x, weight, bias = made(3, 32).to(E4M3), made(4, 32).to(E4M3), made(4).requires_grad_()
    assert "no derivatives" in kernels.supports(kernels.gemm, x, weight, bias=bias).reason
    (found,) = torch.autograd.grad(kernels.gemm(x, weight, bias=bias, out_dtype=torch.float32).sum(), bias)
    torch.testing.assert_close(found, torch.full_like(found, 3.0))
    scale = torch.ones(4, 1, device=DEVICE)
    assert "for both" in kernels.supports(kernels.gemm, x, made(130, 32).to(E4M3), scale_x=scale[:3]).reason


def test_what_does_not_go_together():
    x, weight = made(3, 8), made(5, 8)
    for change, message in (
        ({"weight": made(5, 7)}, r"needs the shape \[results, 8\]"),
        ({"bias": made(4)}, r"bias needs the shape \(5,\)"),
        ({"residual": made(5)}, r"residual needs the shape \(3, 5\)"),
        ({"activation": "gelo"}, "Did you mean 'gelu'"),
        ({"gated": True, "activation": "silu"}, "an even number of results"),
        ({"gated": True, "weight": made(4, 8)}, "needs an activation"),
        ({"out_dtype": torch.int32}, "floating point"),
        ({"scale_x": made(3)}, "goes with values of torch.float8_e4m3fn"),
    ):
        with pytest.raises(UsageError, match=message):
            kernels.gemm(**{"x": x, "weight": weight, **change})
    with pytest.raises(UsageError, match=r"scale_weight needs one of the shapes \(\), \(5,\), \(1, 1\)"):
        kernels.gemm(x.to(E4M3), weight.to(E4M3), scale_weight=made(3))


@pytest.mark.slow
def test_the_operators_are_ones_of_torch():
    x, weight, bias = made(3, 8).requires_grad_(), made(6, 8).requires_grad_(), made(6).requires_grad_()
    for activation, gated, keep in (("", False, False), ("gelu", True, True), ("silu", False, False)):
        residual = made(3, 3 if gated else 6).requires_grad_()
        opcheck(torch.ops.nearpeak.gemm, (x, weight, bias, residual, activation, gated, torch.float32, False, keep))
    opcheck(
        torch.ops.nearpeak.gemm_backward,
        (made(3, 3), x.detach(), weight.detach(), bias.detach(), made(3, 6), "silu", True, False, True, True, False),
    )
    small, other = x.detach().to(E4M3), weight.detach().to(E4M3)
    scale = torch.ones((), device=DEVICE)
    given = (small, other, None, None, scale, scale, "gelu", True, torch.float16, True)
    opcheck(torch.ops.nearpeak.gemm_fp8, given, test_utils="test_faketensor")  # the rest multiplies fp8


def test_it_compiles_without_a_graph_break():
    x, weight, bias = made(3, 8).requires_grad_(), made(6, 8).requires_grad_(), made(6).requires_grad_()

    def function(x, weight, bias):
        return kernels.gemm(x.exp(), weight, bias=bias, activation="silu", gated=True).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = (x, weight, bias)
    found, expected = (torch.autograd.grad(call(*inputs), inputs) for call in (compiled, function))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_same_in_every_run():
    x, weight = made(40, 300, dtype=torch.bfloat16), made(50, 300, dtype=torch.bfloat16)
    assert torch.equal(kernels.gemm(x, weight), kernels.gemm(x, weight))


def test_what_it_does_not_take_runs_the_reference():
    x, weight = made(3, 8).double(), made(4, 8).double()
    assert torch.equal(kernels.gemm(x, weight), x @ weight.T)
    with kernels.using("require"), pytest.raises(KernelUnavailable, match=r"gemm.*float64"):
        kernels.gemm(x, weight)
    assert "one dtype" in kernels.supports(kernels.gemm, made(3, 8), weight.half()).reason


def test_derivatives_of_the_reference():
    inputs = [made(2, 3).double(), made(4, 3).double(), made(4).double(), made(2, 2).double()]
    _, reference = both(activation="gelu", gated=True, bias=True, residual=True)
    assert torch.autograd.gradgradcheck(reference, [one.requires_grad_() for one in inputs])


def test_autocast():
    x, weight = made(4, 8).requires_grad_(), made(5, 8).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16), kernels.using("require"):
        result = kernels.gemm(x, weight, bias=made(5), activation="silu")
    assert result.dtype == torch.bfloat16
    gradients = torch.autograd.grad(result.float().sum(), (x, weight))
    assert all(one.dtype == torch.float32 for one in gradients)


def test_tf32_where_torch_allows_it():
    before = torch.get_float32_matmul_precision()
    x, weight = made(20, 64), made(30, 64)
    try:
        torch.set_float32_matmul_precision("high")
        torch.testing.assert_close(kernels.gemm(x, weight), x @ weight.T, rtol=1e-2, atol=1e-2)
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_layer():
    layer = kernels.Linear(8, 5, activation="silu", gated=True, device=DEVICE)
    x, residual = made(3, 8), made(3, 5)
    assert layer.weight.shape == (10, 8)
    options = {"bias": layer.bias, "activation": "silu", "gated": True, "residual": residual}
    expected = kernels.gemm.reference(x, layer.weight, **options)
    torch.testing.assert_close(layer(x, residual), expected)
    assert "activation='silu', gated=True" in repr(layer)
    plain = kernels.Linear(8, 5, bias=False, device=DEVICE)
    torch.testing.assert_close(plain(x), x @ plain.weight.T)
