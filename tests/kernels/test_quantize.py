"""`quantize` and `dequantize`: bit for bit as torch, and what is promised of scales and of what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")

from nearpeak.kernels.quantize import triton as quantize_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = ["tensor", "row", (1, 128), (128, 128), (1, 16), (32, 32)]


def same(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.float().isnan(), expected.float().isnan())
    return torch.equal(actual.float().nan_to_num(), expected.float().nan_to_num())


def assert_as_torch(x, block, dtype=E4M3, power_of_two=False, back=torch.float32):
    with kernels.using("require"):
        values, scales = kernels.quantize(x, block=block, dtype=dtype, power_of_two=power_of_two)
        again = kernels.dequantize(values, scales, block=block, dtype=back)
    expected, expected_scales = kernels.quantize.reference(x, block=block, dtype=dtype, power_of_two=power_of_two)
    assert values.is_contiguous()
    assert same(scales, expected_scales)
    assert same(values, expected)
    assert same(again, kernels.dequantize.reference(expected, expected_scales, block=block, dtype=back))
    return values, scales, again


@pytest.mark.slow
@pytest.mark.parametrize("given_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_is_bit_for_bit_that_of_torch(block, given_dtype):
    torch.manual_seed(0)
    for index, shape in enumerate([(3, 130), (130, 40), (2, 17, 33), (1, 1)]):
        x = (torch.randn(shape, device=DEVICE) * 10 ** (index - 2)).to(given_dtype)
        assert_as_torch(x, block, (E4M3, E5M2)[index % 2], index % 3 == 0, given_dtype)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(BLOCKS),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
    st.integers(0, 4),
)
def test_any_shape_and_layout(shape, given_dtype, block, dtype, power_of_two, layout):
    x = torch.randn(shape, device=DEVICE).to(given_dtype)
    ways = list(layouts(x))
    assert_as_torch(ways[layout % len(ways)][1], block, dtype, power_of_two)


@pytest.mark.parametrize("block", ["tensor", "row", (1, 128)], ids=str)
def test_numbers_in_a_row_and_a_single_one(block):
    assert_as_torch(torch.randn(300, device=DEVICE), block)
    if block == "tensor":
        assert_as_torch(torch.tensor(3.0, device=DEVICE), block)


@pytest.mark.parametrize("columns", [quantize_triton.MAX_REGISTER_ROW, quantize_triton.MAX_REGISTER_ROW + 1, 40_000])
def test_long_rows(columns):
    torch.manual_seed(0)
    x = torch.randn(2, columns, device=DEVICE).bfloat16()
    assert_as_torch(x, "row")


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_comes_back_is_near(dtype, power_of_two):
    torch.manual_seed(0)
    x = torch.randn(40, 300, device=DEVICE) * torch.logspace(-6, 6, 300, device=DEVICE)
    values, scales, again = assert_as_torch(x, (1, 128), dtype, power_of_two)
    of_each = scales.repeat_interleave(128, 1)[:, :300]
    format_of = torch.finfo(dtype)
    # half a unit of the last place, and for the smallest numbers half of the smallest step
    allowed = x.abs() * format_of.eps / 2 + of_each * format_of.smallest_normal * format_of.eps / 2
    assert ((again - x).abs() <= allowed * (1 + 1e-6)).all()
    largest = torch.nn.functional.pad(x, (0, 84)).abs().view(40, 3, 128).amax(-1)
    if power_of_two:
        assert torch.equal(scales.log2(), scales.log2().round())
        assert (scales * format_of.max >= largest).all()
        assert (scales * format_of.max < 2 * largest * (1 + 1e-6)).all()
    else:
        # by a tensor: on a GPU torch multiplies by the inverse of a number instead
        assert torch.equal(scales, largest / torch.full_like(largest, format_of.max))
        assert (values.float().view(40, 300).abs().amax(1) == format_of.max).all()


def test_powers_of_two_are_exact_at_their_borders():
    for exponent in (-20, 0, 10):
        for factor in (1.0, 1 + 2**-7, 2 - 2**-7):
            x = torch.full((1, 16), 448 * 2.0**exponent * factor, device=DEVICE)
            _, scales, _ = assert_as_torch(x, (1, 16), E4M3, True)
            assert scales.item() == 2.0 ** (exponent + math.ceil(math.log2(factor)))


@pytest.mark.parametrize("block", ["tensor", "row", (1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_not_finite(block, dtype):
    x = torch.ones(16, 16, device=DEVICE)
    x[:, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), -2.0], device=DEVICE)
    values, scales, _ = assert_as_torch(x, block, dtype)
    limit = torch.finfo(dtype).max
    assert torch.equal(scales, torch.full_like(scales, 2 / limit))
    assert values[0, [0, 1, 3]].float().tolist() == [limit, -limit, -limit]
    assert values[0, 2].float().isnan()


@pytest.mark.parametrize("block", BLOCKS[:4], ids=str)
def test_blocks_of_zeros_and_of_the_smallest_numbers(block):
    x = torch.zeros(130, 140, device=DEVICE)
    values, scales, _ = assert_as_torch(x, block)
    assert torch.equal(scales, torch.ones_like(scales))
    assert not values.float().any()
    values, scales, _ = assert_as_torch(x[:20] + 1e-44, block, power_of_two=True)
    assert torch.equal(scales, torch.full_like(scales, 2.0**-126))
    x[0, 0] = torch.finfo(torch.float32).max
    _, scales, _ = assert_as_torch(x, block, power_of_two=True)
    assert scales.isfinite().all()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_nothing(block, shape):
    assert_as_torch(torch.empty(shape, device=DEVICE), block)


@pytest.mark.parametrize("block", ["tensor", "row", (1, 16), (16, 16)], ids=str)
def test_rows_beyond_32_bits(block):
    """Rows so far from each other that the second one is beyond 2**31 elements; the memory between is never touched."""
    stride = 2**31 + 16
    memory = torch.empty(stride + 24, dtype=torch.bfloat16, device=DEVICE)
    x = memory.as_strided((2, 24), (stride, 1))
    x.copy_(torch.arange(48, device=DEVICE).view(2, 24))
    values, scales, _ = assert_as_torch(x, block)
    far = values.view(torch.uint8)
    memory = torch.empty(stride + 24, dtype=torch.uint8, device=DEVICE)
    spread = memory.as_strided((2, 24), (stride, 1)).copy_(far).view(E4M3)
    with kernels.using("require"):
        again = kernels.dequantize(spread, scales, block=block)
    assert torch.equal(again, kernels.dequantize(values, scales, block=block))


def test_few_blocks_are_spread_over_all_multiprocessors():
    few, many = quantize_triton.heuristic(128, 384, 132), quantize_triton.heuristic(128, 10**6, 132)
    assert (few.pieces, few.warps) == (2, 1)
    assert (many.pieces, many.warps) == (32, 4)
    assert quantize_triton.heuristic(16384, 40, 132).pieces == 1


def test_all_candidates_compute_the_same():
    x = torch.randn(3, 300, device=DEVICE)
    expected = kernels.quantize.reference(x, block=(1, 128))
    assert len(quantize_triton.candidates(128)) >= 10
    for config in quantize_triton.candidates(128)[::5]:
        actual = quantize_triton.quantize(x, 1, 128, E4M3, False, config=config)
        assert all(map(same, actual, expected))
    for candidates in (
        quantize_triton.tiles_candidates,
        quantize_triton.loop_candidates,
        quantize_triton.dequantize_candidates,
    ):
        assert len(candidates()) >= 4


def test_the_operators_are_of_torch():
    # the check of the schema compares tensors in a way that torch has not for 8 bits
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    quantize, dequantize = torch.ops.nearpeak.quantize.default, torch.ops.nearpeak.dequantize.default
    x = torch.randn(5, 40, device=DEVICE)
    for sizes in [(0, 0), (1, 0), (16, 16)]:
        opcheck(quantize, (x, *sizes, E4M3, True), test_utils=checks)
    opcheck(quantize, (x.t().double(), 1, 16, E5M2, False), test_utils=checks)
    values, scales = kernels.quantize(x, block=(1, 16))
    for dtype in (torch.bfloat16, torch.float64):
        opcheck(dequantize, (values, scales, 1, 16, dtype), test_utils=checks)


def test_it_compiles_without_a_graph_break():
    def there_and_back(x):
        values, scales = kernels.quantize(x * 2, block=(1, 16))
        return kernels.dequantize(values, scales, block=(1, 16), dtype=torch.float32) + 1

    x = torch.randn(3, 40, device=DEVICE, requires_grad=True)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), there_and_back(x))
    assert not there_and_back(x).requires_grad


def test_what_it_does_not_take():
    x = torch.randn(3, 40, device=DEVICE, dtype=torch.float64)
    assert "float64" in kernels.supports(kernels.quantize, x, block="row").reason
    kernels.quantize(x, block="row")
    whole = torch.arange(8, device=DEVICE)
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="floating point"):
        kernels.quantize(whole, block="tensor")
    assert kernels.quantize(whole, block="tensor")[0].float()[-1] == 448


@pytest.mark.parametrize(
    ("block", "said"),
    [("rows", "Did you mean 'row'"), ((1, 100), "powers of two"), ((1, 8), "from 16"), ((256, 256), "32768")],
)
def test_blocks_that_do_not_exist(block, said):
    with pytest.raises(UsageError, match=said):
        kernels.quantize(torch.ones(4, 4), block=block)


def test_calls_that_make_no_sense():
    with pytest.raises(UsageError, match="2 dimensions"):
        kernels.quantize(torch.ones(4), block=(16, 16))
    with pytest.raises(UsageError, match=r"not torch\.float16"):
        kernels.quantize(torch.ones(4), block="row", dtype=torch.float16)
    with pytest.raises(UsageError, match=r"not torch\.float32"):
        kernels.dequantize(torch.ones(4), torch.ones(()), block="row")
    with pytest.raises(UsageError, match=r"shape \(4, 2\).*\(4,\)"):
        kernels.dequantize(torch.ones(4, 256).to(E4M3), torch.ones(4), block=(1, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_large_tensors(block):
    torch.manual_seed(0)
    x = torch.randn(8192, 7168, device=DEVICE).bfloat16()
    first = assert_as_torch(x, block)
    for _ in range(100):
        values, scales = kernels.quantize(x, block=block)
        assert torch.equal(values.view(torch.uint8), first[0].view(torch.uint8))
        assert torch.equal(scales, first[1])


@pytest.mark.gpu
def test_recorded_and_compiled():
    x = torch.randn(512, 1024, device=DEVICE).bfloat16()
    for block in BLOCKS:
        kernels.quantize(x, block=block)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values, scales = kernels.quantize(x, block=block)
        x.normal_()
        graph.replay()
        expected = kernels.quantize.reference(x, block=block)
        assert same(values, expected[0])
        assert same(scales, expected[1])
    compiled = torch.compile(lambda x: kernels.quantize(x * 2, block=(1, 128)), fullgraph=True)
    assert all(map(same, compiled(x), kernels.quantize(x * 2, block=(1, 128))))
