"""`swiglu`, `geglu`, and both from packed tensors."""

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

from nearpeak.kernels.pointwise import triton as pointwise_triton
from nearpeak.kernels.pointwise.triton import TileConfig, fitting_block, tile_heuristic


def both(function, **options):
    return partial(function, **options), partial(function.reference, **options)


FROM_TWO = {
    "swiglu": both(kernels.swiglu),
    "geglu": both(kernels.geglu),
    "geglu, tanh": both(kernels.geglu, approximate="tanh"),
}
PACKED = {
    "swiglu": both(kernels.swiglu_packed),
    "swiglu, interleaved": both(kernels.swiglu_packed, interleaved=True),
    "geglu": both(kernels.geglu_packed),
    "geglu, tanh, interleaved": both(kernels.geglu_packed, approximate="tanh", interleaved=True),
}


def test_few_elements_are_spread_over_all_multiprocessors():
    few, many = tile_heuristic(82, 960), tile_heuristic(8192, 960)
    assert (few.block * few.rows, few.warps) == (512, 2)
    assert (many.block * many.rows, many.warps) == (4096, 8)


def test_a_tile_measured_in_one_row_takes_the_shape_of_others(monkeypatch):
    row = {"block": 1024, "rows": 1, "warps": 8}
    monkeypatch.setattr(pointwise_triton, "tuned", lambda kernel, elements, device: row if elements > 4096 else None)
    cpu = torch.device("cpu")
    assert pointwise_triton.tile_config("gated_forward", 1, 10**6, cpu) == TileConfig(**row)
    assert pointwise_triton.tile_config("gated_forward", 104, 500, cpu) == TileConfig(block=512, rows=2, warps=8)
    assert pointwise_triton.tile_config("gated_forward", 1, 4096, cpu) == tile_heuristic(1, 4096)
    assert pointwise_triton.tile_config("gated_forward", 8192, 4096, cpu) == tile_heuristic(8192, 4096)


@pytest.mark.parametrize("columns", [8, 100, 576, 840, 1160, 4724, 7960, 14336])
def test_blocks_leave_few_threads_without_columns(columns):
    for most in (1024, 4096):
        block = fitting_block(columns, most)
        assert -(-columns // block) * block <= 1.1 * max(-(-columns // 128) * 128, block)
        assert block <= most
    assert fitting_block(4096, 1024) == 1024


def made(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 130), (1, 4100), (2,)], ids=str)
def test_values_and_gradients(shape, dtype):
    x, y = made(*shape, dtype=dtype), made(*shape, dtype=dtype, seed=1)
    with kernels.using("require"):
        for functions in FROM_TWO.values():
            assert_kernel_is_exact(*functions, [x, y], by_exp=True)
        for functions in PACKED.values():
            assert_kernel_is_exact(*functions, [x], by_exp=True)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 20),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.sampled_from(list(PACKED)),
)
@settings(max_examples=30)
def test_any_shape_and_layout(shape, columns, dtype, ways, name):
    def way(tensor, which):
        views = [one for _, one in layouts(tensor)]
        return views[which % len(views)]

    gate, up, upstream = (way(made(*shape, columns, dtype=dtype, seed=seed), ways[seed]) for seed in range(3))
    x = way(made(*shape, 2 * columns, dtype=dtype), ways[0])
    with kernels.using("require"):
        assert_kernel_is_exact(*FROM_TWO["swiglu"], [gate, up], upstream, by_exp=True)
        assert_kernel_is_exact(*PACKED[name], [x], upstream, by_exp=True)


def test_halves_of_one_tensor_are_not_copied():
    from nearpeak.kernels.pointwise.triton import as_tiles

    x = made(2, 3, 20, dtype=torch.bfloat16)
    gate, up = x.chunk(2, -1)
    tiles = as_tiles(gate, up, flat=True)
    assert [one.data_ptr() for one in tiles] == [gate.data_ptr(), up.data_ptr()]
    with kernels.using("require"):
        assert torch.equal(kernels.swiglu(gate, up), kernels.swiglu_packed(x))
        assert torch.equal(kernels.geglu(x[..., ::2], x[..., 1::2]), kernels.geglu_packed(x, interleaved=True))


def test_the_gradient_of_a_packed_tensor_is_both_gradients():
    x, upstream = made(4, 10), made(4, 5)
    _, (packed,) = gradients(kernels.swiglu_packed, [x], upstream)
    _, parts = gradients(kernels.swiglu, list(x.chunk(2, -1)), upstream)
    assert torch.equal(packed, torch.cat(parts, -1))
    _, (expanded,) = gradients(kernels.swiglu_packed, [x], torch.ones((), device=DEVICE).expand(4, 5))
    assert torch.equal(expanded, gradients(kernels.swiglu_packed, [x], torch.ones(4, 5, device=DEVICE))[1][0])


def test_no_rows_and_no_columns():
    for shape in ((0, 4), (3, 0)):
        x = made(*shape).requires_grad_()
        with kernels.using("require"):
            assert kernels.swiglu(x, x).shape == shape
            result = kernels.swiglu_packed(x)
        result.sum().backward()
        assert result.shape == (shape[0], shape[1] // 2)
        assert x.grad.shape == shape


def test_rows_more_than_two_gibibytes_apart():
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    for rows, far in ((2, 2**31 + 16), (3, 2**30 + 16)):  # a stride, and a multiple of one, beyond 32 bits
        x = storage.as_strided((rows, 8), (far, 1))
        x.copy_(made(rows, 8))
        with kernels.using("require"):
            assert_kernel_is_exact(*FROM_TWO["swiglu"], [x, x], x)
            assert_kernel_is_exact(*PACKED["swiglu"], [x])
            assert_kernel_is_exact(*PACKED["swiglu, interleaved"], [x])


def test_all_candidates_give_the_same():
    from nearpeak.kernels.pointwise import triton as pointwise_triton

    x, upstream = made(3, 140), made(3, 70)
    expected, slope = (
        pointwise_triton.gated_packed_forward(x, "silu", False),
        pointwise_triton.gated_packed_backward(upstream, x, "silu", False),
    )
    for config in pointwise_triton.tile_candidates(70):
        assert torch.equal(pointwise_triton.gated_packed_forward(x, "silu", False, config=config), expected)
        assert torch.equal(pointwise_triton.gated_packed_backward(upstream, x, "silu", False, config=config), slope)


def test_the_operators_are_those_of_torch():
    x, y, upstream = made(3, 6).requires_grad_(), made(3, 6).requires_grad_(), made(3, 6)
    names = torch.ops.nearpeak
    opcheck(names.gated.default, (x, y, "silu"))
    opcheck(names.gated_packed.default, (x, "gelu", True))
    opcheck(names.gated_packed.default, (made(6, 3).t(), "gelu", False), test_utils="test_faketensor")
    x, y = x.detach(), y.detach()
    opcheck(names.gated_backward.default, (upstream, x, y, "gelu_tanh"), test_utils="test_faketensor")
    opcheck(names.gated_packed_backward.default, (made(3, 3), x, "silu", False), test_utils="test_faketensor")


def test_modules_compile_without_a_graph_break():
    for module in (kernels.SwiGLU(interleaved=True), kernels.GeGLU("tanh")):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), module, torch.nn.Linear(4, 2)).to(DEVICE)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x = made(3, 4)
        parameters = list(model.parameters())
        actual = torch.autograd.grad(compiled(x).sum(), parameters)
        with kernels.using("off"):
            expected = torch.autograd.grad(model(x).sum(), parameters)
        torch.testing.assert_close(actual, expected)
    assert "interleaved=True" in repr(kernels.SwiGLU(interleaved=True))
    assert "'tanh'" in repr(kernels.GeGLU("tanh"))


def test_references_in_float64():
    x, y = made(3, 4).double().requires_grad_(), made(3, 4, seed=1).double().requires_grad_()
    for function, _ in FROM_TWO.values():
        torch.autograd.gradcheck(function, (x, y))
    for function, _ in PACKED.values():
        torch.autograd.gradcheck(function, (x,))


def test_what_it_does_not_take():
    x = made(3, 4)
    assert kernels.swiglu(x, made(4)).shape == (3, 4)
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="one shape and dtype"):
        kernels.swiglu(x, made(4))
    with pytest.raises(UsageError, match=r"even last dimension.*\(3, 5\)"):
        kernels.swiglu_packed(made(3, 5))
    with pytest.raises(UsageError, match='"none" or "tanh"'):
        kernels.GeGLU("sigmoid")


@pytest.mark.gpu
def test_exact_at_full_size_and_always_the_same():
    x, upstream = made(8192, 2 * 14336, dtype=torch.bfloat16), made(8192, 14336, dtype=torch.bfloat16, seed=2)
    few = slice(8192 - 64, None)
    with kernels.using("require"):
        for name in PACKED:
            function, reference = PACKED[name]
            value, (slope,) = gradients(function, [x], upstream)
            exact, (exact_slope,) = gradients(reference, [x[few].double()], upstream[few])
            low, (low_slope,) = gradients(reference, [x[few]], upstream[few])
            assert_as_exact(value[few], exact, low, "value")
            assert_as_exact(slope[few], exact_slope, low_slope, "gradient")
        for _ in range(100):
            again, (slope_again,) = gradients(function, [x], upstream)
            assert torch.equal(again, value)
            assert torch.equal(slope_again, slope)


@pytest.mark.gpu
def test_in_a_graph_and_compiled():
    x = made(256, 2048, dtype=torch.bfloat16)
    expected = kernels.swiglu_packed(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = kernels.swiglu_packed(x)
    graph.replay()
    assert torch.equal(actual, expected)
    x.requires_grad_()
    compiled = torch.compile(lambda x: kernels.swiglu_packed(x * 2).sum(), fullgraph=True)
    actual = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(actual, torch.autograd.grad(kernels.swiglu_packed(x * 2).sum(), x))
