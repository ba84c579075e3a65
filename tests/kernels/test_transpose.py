"""`transpose_copy`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def made(*shape, dtype=torch.float32):
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    return (50 * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


def assert_is_transposed(x, **options):
    from nearpeak.kernels.transpose import triton as transpose_triton

    with kernels.using("require"):
        actual = transpose_triton.forward(x, **options) if options else kernels.transpose_copy(x)
    expected = x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    assert actual.dtype == x.dtype
    assert actual.stride() == expected.stride()
    bits = BITS[x.element_size()]
    assert torch.equal(actual.view(bits), expected.view(bits))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 6), (2, 70, 130), (1, 1), (0, 4), (2, 3, 0), (1, 257)], ids=str)
def test_any_dtype(shape, dtype):
    assert_is_transposed(made(*shape, dtype=dtype))


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 2), max_size=3),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.permutations(range(5)),
)
@settings(max_examples=25)
def test_any_strides(shape, rows, columns, dtype, way, order):
    x = made(*shape, rows, columns).to(dtype)
    views = [one for _, one in layouts(x.to(torch.float32) if dtype.itemsize == 1 and x.is_floating_point() else x)]
    x = views[way % len(views)]
    x = x.permute([one for one in order if one < x.dim()])
    assert_is_transposed(x)


def test_slices_and_expanded_tensors():
    x = made(6, 34, dtype=torch.int8)
    for one in (
        x[:, 1:],
        x[:, 2:],
        x[1:, :32],
        x[:, :33],
        x[::2],
        x[::2, 2:],
        x[:1].expand(6, 34),
        x[:, :1].expand(6, 7),
    ):
        assert_is_transposed(one)
    assert_is_transposed(x.expand(3, 6, 34))
    assert_is_transposed(made(2, 5, 3, 8).permute(0, 2, 1, 3))
    assert_is_transposed(made(2, 3, 2, 5, 8).permute(2, 1, 0, 4, 3))  # more strides than the kernel takes


@pytest.mark.parametrize("element_size", [1, 2, 4])
def test_all_candidates_give_the_same(element_size):
    from nearpeak.kernels.transpose import triton as transpose_triton

    x = made(70, 130, dtype={1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[element_size])
    for config in transpose_triton.candidates(8192, element_size)[::3]:
        assert_is_transposed(x, config=config)


def test_rows_more_than_two_gibibytes_apart():
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    for shape, strides in (
        ((2, 8), (2**31 + 16, 1)), ((2, 3, 4), (2**31 + 16, 4, 1)), ((3, 2), (1, 2**31 + 16)),
        ((3, 8), (2**30 + 16, 1)), ((3, 3, 4), (2**30 + 16, 4, 1)), ((3, 3), (1, 2**30 + 16)),
    ):  # fmt: skip
        x = storage.as_strided(shape, strides)
        x.copy_(made(*shape))
        assert_is_transposed(x)
    storage = storage.view(torch.int8)
    x = storage.as_strided((2, 4, 8), (8, 2**30 + 16, 1))
    x.copy_(made(2, 4, 8))
    assert_is_transposed(x)


def test_gradients():
    x = made(2, 5, 7).requires_grad_()
    for upstream in (made(2, 7, 5), made(2, 5, 7).transpose(1, 2), made(5).expand(2, 7, 5)):
        with kernels.using("require"):
            (actual,) = torch.autograd.grad(kernels.transpose_copy(x), x, upstream)
        assert torch.equal(actual, upstream.transpose(1, 2))
    torch.autograd.gradcheck(kernels.transpose_copy.reference, made(3, 4).double().requires_grad_())


@pytest.mark.slow
def test_the_operator_is_one_of_torch():
    opcheck(torch.ops.nearpeak.transpose_copy.default, (made(2, 3, 5).requires_grad_(),))
    opcheck(torch.ops.nearpeak.transpose_copy.default, (made(5, 3).t(),))


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    x = made(3, 5).requires_grad_()
    compiled = torch.compile(lambda x: (kernels.transpose_copy(x.exp()) * 2).sum(), fullgraph=True, backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(actual, 2 * x.exp())


def test_it_is_always_a_copy():
    x = made(4, 3)
    assert kernels.transpose_copy(x.t()).data_ptr() != x.data_ptr()
    with kernels.using("off"):
        assert kernels.transpose_copy(x.t()).data_ptr() != x.data_ptr()


def test_an_imaginary_part_has_the_signs_of_its_conjugate():
    x = torch.randn(3, 4, dtype=torch.complex64, device=DEVICE).conj().imag
    assert x.is_neg()
    with kernels.using("require"):
        assert torch.equal(kernels.transpose_copy(x), x.t())


def test_what_it_does_not_take():
    x = made(3, 4).to(torch.complex64)
    assert torch.equal(kernels.transpose_copy(x.conj()), x.conj().t())
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="real numbers, and this is complex64"):
        kernels.transpose_copy(x)
    with pytest.raises(UsageError, match="two dimensions or more"):
        kernels.transpose_copy(made(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_at_full_size_and_always_the_same(dtype):
    x = made(8192, 8192, dtype=dtype)
    expected = x.t().contiguous().view(torch.int8)
    with kernels.using("require"):
        for _ in range(100):
            assert torch.equal(kernels.transpose_copy(x).view(torch.int8), expected)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    x = torch.randint(-128, 128, (2, 2**15, 2**15 + 16), dtype=torch.int8, device=DEVICE)
    assert torch.equal(kernels.transpose_copy(x), x.transpose(1, 2).contiguous())


@pytest.mark.gpu
def test_in_a_graph_and_compiled():
    x = made(512, 1024, dtype=torch.bfloat16)
    kernels.transpose_copy(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = kernels.transpose_copy(x)
    graph.replay()
    assert torch.equal(actual, x.t())
    compiled = torch.compile(lambda x: kernels.transpose_copy(x * 2) + 1, fullgraph=True)
    assert torch.equal(compiled(x), (x * 2).t() + 1)
