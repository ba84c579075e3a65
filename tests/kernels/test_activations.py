"""`bias_gelu`, `bias_silu`, `bias_relu_squared`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, gradients, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")
ALL = {
    "gelu": (kernels.bias_gelu, kernels.bias_gelu.reference),
    "gelu_tanh": (
        partial(kernels.bias_gelu, approximate="tanh"),
        partial(kernels.bias_gelu.reference, approximate="tanh"),
    ),
    "silu": (kernels.bias_silu, kernels.bias_silu.reference),
    "relu_squared": (kernels.bias_relu_squared, kernels.bias_relu_squared.reference),
}


def made(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 130), (37, 64), (1,)], ids=str)
def test_values_and_gradients(shape, dtype, name):
    x, bias = made(*shape, dtype=dtype), made(shape[-1], dtype=dtype, seed=1)
    with kernels.using("require"):
        assert_kernel_is_exact(*ALL[name], [x, bias], by_exp=name != "relu_squared")
        assert_kernel_is_exact(*ALL[name], [x], by_exp=name != "relu_squared")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_several_blocks(dtype):
    x, bias = made(2, 4100, dtype=dtype), made(4100, dtype=dtype, seed=1)
    with kernels.using("require"):
        assert_kernel_is_exact(*ALL["gelu"], [x, bias])
        assert_kernel_is_exact(*ALL["silu"], [x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_of_another_dtype(dtype):
    x = made(5, 33, dtype=dtype)
    with kernels.using("require"):
        assert_kernel_is_exact(*ALL["gelu"], [x, made(33, seed=1)])
        assert_kernel_is_exact(*ALL["gelu"], [x.float(), made(33, dtype=dtype, seed=1)])
        assert kernels.bias_silu(x, made(33)).dtype == dtype


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 40),
    st.sampled_from(list(ALL)),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.integers(0, 4),
)
@settings(max_examples=30)
def test_any_shape_and_layout(shape, columns, name, dtype, left, right):
    x, upstream = made(*shape, columns, dtype=dtype), made(*shape, columns, dtype=dtype, seed=2)
    x = [one for _, one in layouts(x)][left % len(list(layouts(x)))]
    upstream = [one for _, one in layouts(upstream)][right % len(list(layouts(upstream)))]
    with kernels.using("require"):
        inputs = [x, made(columns, dtype=dtype, seed=1)]
        assert_kernel_is_exact(*ALL[name], inputs, upstream, by_exp=name != "relu_squared")


def test_expanded_inputs_and_gradients():
    x, bias = made(1, 6).expand(5, 6), made(6)
    with kernels.using("require"):
        for upstream in (torch.ones((), device=DEVICE).expand(5, 6), made(5, 1).expand(5, 6), made(6).expand(5, 6)):
            assert_kernel_is_exact(*ALL["silu"], [x, bias], upstream)
        assert_kernel_is_exact(*ALL["silu"], [x, made(1).expand(6)])


def test_no_rows_and_no_columns():
    for shape in ((0, 4), (3, 0), (2, 0, 5)):
        x, bias = made(*shape).requires_grad_(), made(shape[-1]).requires_grad_()
        with kernels.using("require"):
            kernels.bias_gelu(x, bias).sum().backward()
        assert x.grad.shape == x.shape
        assert torch.equal(bias.grad, torch.zeros_like(bias))
    assert kernels.bias_silu(torch.tensor(1.5, device=DEVICE)).shape == ()


def test_tails_and_infinities():
    """GELU of -inf is 0 here, its limit, and not a number in torch; all else is as in torch, which on some CPUs has no
    GELU of infinity in float32."""
    x = torch.tensor([-1e30, -100.0, 100.0, 1e30, torch.inf, torch.nan], device=DEVICE)
    for name, (kernel, reference) in ALL.items():
        torch.testing.assert_close(kernel(x), reference(x.double()).float(), equal_nan=True, msg=name)
    assert kernels.bias_gelu(torch.tensor([-torch.inf], device=DEVICE)) == 0
    x = torch.linspace(-6, -3, 100, device=DEVICE)
    exact = kernels.bias_gelu.reference(x.double())
    assert ((kernels.bias_gelu(x) - exact) / exact).abs().max() < 1e-4  # torch in float32: up to 100 %


def test_only_what_is_asked_for_gets_a_gradient():
    x, bias = made(4, 5).requires_grad_(), made(5)
    (kernels.bias_gelu(x, bias).sum()).backward()
    assert x.grad is not None
    x, bias = made(4, 5), made(5).requires_grad_()
    (actual,) = torch.autograd.grad(kernels.bias_gelu(x, bias).sum(), bias)
    (expected,) = torch.autograd.grad(kernels.bias_gelu.reference(x, bias).sum(), bias)
    torch.testing.assert_close(actual, expected)


def test_sums_over_many_rows():
    from nearpeak.kernels.pointwise import triton as pointwise_triton

    x, bias, upstream = made(60, 6, dtype=torch.bfloat16), made(6, dtype=torch.bfloat16), made(60, 6, seed=3)
    upstream = upstream.bfloat16()
    _, (_, exact) = gradients(ALL["gelu"][1], [x.double(), bias.double()], upstream)
    _, (_, low) = gradients(ALL["gelu"][1], [x, bias], upstream)
    for rows in (1, 4):
        config = pointwise_triton.ColumnSumConfig(block=8, rows=rows, warps=4, programs=7)
        _, actual = pointwise_triton.activation_backward_with_bias(upstream, x, bias, "gelu", config=config)
        assert_as_exact(actual, exact, low)


def test_all_candidates_give_the_same():
    from nearpeak.kernels.pointwise import triton as pointwise_triton

    x, bias = made(3, 70), made(70)
    expected = pointwise_triton.activation_forward(x, bias, "silu")
    for config in pointwise_triton.tile_candidates(70):
        assert torch.equal(pointwise_triton.activation_forward(x, bias, "silu", config=config), expected)
    slope, total = pointwise_triton.activation_backward_with_bias(x, x, bias, "silu")
    for config in pointwise_triton.column_sum_candidates(70)[::3]:
        actual = pointwise_triton.activation_backward_with_bias(x, x, bias, "silu", config=config)
        assert torch.equal(actual[0], slope)
        torch.testing.assert_close(actual[1], total)


def test_rows_more_than_two_gibibytes_apart():
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    for rows, far in ((2, 2**31 + 16), (3, 2**30 + 16)):  # a stride, and a multiple of one, beyond 32 bits
        x = storage.as_strided((rows, 8), (far, 1))
        x.copy_(made(rows, 8))
        with kernels.using("require"):
            assert_kernel_is_exact(*ALL["silu"], [x, made(8, dtype=torch.float16)], x)


@pytest.mark.slow
def test_the_operators_are_those_of_torch():
    x, bias, upstream = made(3, 5).requires_grad_(), made(5).requires_grad_(), made(3, 5)
    names = torch.ops.nearpeak
    opcheck(names.activation.default, (x, bias, "gelu"))
    opcheck(names.activation.default, (x, None, "silu"), test_utils="test_faketensor")
    opcheck(names.activation.default, (made(5, 3).t(), bias, "relu_squared"), test_utils="test_faketensor")
    x, bias = x.detach(), bias.detach()
    opcheck(names.activation_backward.default, (upstream, x, None, "gelu_tanh"), test_utils="test_faketensor")
    opcheck(names.activation_backward_with_bias.default, (upstream, x, bias, "gelu"))


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    x, bias = made(3, 5).requires_grad_(), made(5).requires_grad_()
    compiled = torch.compile(lambda x, b: kernels.bias_gelu(x * 2, b).sum(), fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x, bias), (x, bias))
    expected = torch.autograd.grad(kernels.bias_gelu.reference(x * 2, bias).sum(), (x, bias))
    torch.testing.assert_close(actual, expected)


def test_references_in_float64():
    x, bias = made(3, 4).double().requires_grad_(), made(4).double().requires_grad_()
    for kernel, _ in ALL.values():
        torch.autograd.gradcheck(kernel, (x, bias))
    torch.autograd.gradgradcheck(kernels.bias_silu, (x, bias))


def test_what_it_does_not_take():
    x = made(3, 4)
    assert torch.equal(kernels.bias_silu(x, made(3, 1)), torch.nn.functional.silu(x + made(3, 1)))
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="bias as long as the last dimension"):
        kernels.bias_silu(x, made(3, 1))
    assert "int64" in kernels.supports(kernels.bias_relu_squared, x.long()).reason
    with pytest.raises(UsageError, match='"none" or "tanh", and not \'sigmoid\''):
        kernels.bias_gelu(x, approximate="sigmoid")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 4096), (1024, 262144)], ids=str)
def test_exact_at_full_size_and_always_the_same(shape):
    x, bias = made(*shape, dtype=torch.bfloat16), made(shape[-1], dtype=torch.bfloat16, seed=1)
    upstream = made(*shape, dtype=torch.bfloat16, seed=2)
    with kernels.using("require"):
        value, (x_gradient, bias_gradient) = gradients(kernels.bias_gelu, [x, bias], upstream)
        few = slice(shape[0] - 8, None)
        exact, (exact_x, _) = gradients(ALL["gelu"][1], [x[few].double(), bias.double()], upstream[few])
        low, (low_x, _) = gradients(ALL["gelu"][1], [x[few], bias], upstream[few])
        assert_as_exact(value[few], exact, low, "value")
        assert_as_exact(x_gradient[few], exact_x, low_x, "gradient")
        some = slice(0, 1024)
        _, (_, exact) = gradients(ALL["gelu"][1], [x[:, some].double(), bias[some].double()], upstream[:, some])
        assert_as_exact(bias_gradient[some], exact, exact.bfloat16(), "gradient of the bias")
        for _ in range(100):
            again, (x_again, bias_again) = gradients(kernels.bias_gelu, [x, bias], upstream)
            assert torch.equal(again, value)
            assert torch.equal(x_again, x_gradient)
            assert torch.equal(bias_again, bias_gradient)


@pytest.mark.gpu
def test_in_a_graph_and_compiled():
    x, bias = made(256, 1024, dtype=torch.bfloat16), made(1024, dtype=torch.bfloat16, seed=1)
    expected = kernels.bias_gelu(x, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = kernels.bias_gelu(x, bias)
    graph.replay()
    assert torch.equal(actual, expected)
    x.requires_grad_()
    bias.requires_grad_()
    compiled = torch.compile(lambda x, b: kernels.bias_gelu(x, b).sum(), fullgraph=True)
    actual = torch.autograd.grad(compiled(x, bias), (x, bias))
    torch.testing.assert_close(actual, torch.autograd.grad(kernels.bias_gelu(x, bias).sum(), (x, bias)))
