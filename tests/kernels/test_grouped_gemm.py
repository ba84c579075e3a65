"""`grouped_gemm`: results and gradients, whatever rows experts have; and the lists of tiles behind it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, gradients, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")

from nearpeak.kernels.gemm import grouped, grouped_triton
from nearpeak.kernels.gemm.tuning import SM90_GROUPED_CONFIGS, SM90_GROUPED_GRADIENT_CONFIGS, grouped_candidates

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without products in bfloat16

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
SPREADS = [[5, 0, 9, 2], [0, 0, 0], [40, 1, 0, 0, 3], [7], [0, 0, 90, 0]]


def counts_of(counts, dtype=torch.int32):
    return torch.tensor(counts, dtype=dtype, device=DEVICE)


def made(counts, columns, depth, dtype=torch.float32, behind=0):
    rows = torch.randn(sum(counts) + behind, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(len(counts), columns, depth, device=DEVICE) * depth**-0.5).to(dtype)
    return rows, weight


@pytest.mark.parametrize("height", [16, 32, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_list_of_tiles(height, dtype):
    for counts, rows in [([5, 0, 40, 2], 50), ([0], 3), ([0, 0], 0), ([700, 33, 0], 733), ([9, 9], 12), ([-3, 4], 9)]:
        given = counts_of(counts, dtype)
        found = grouped.group_rows(given, rows, height)
        expected = grouped.build_groups(given, rows, height)
        experts = len(counts)
        assert len(found) == len(expected)
        at = grouped.entries_offset(experts)
        used = at + 8 * int(expected[experts + 1])
        assert used <= len(found)
        assert torch.equal(found[: experts + 2], expected[: experts + 2])
        assert torch.equal(found[at:used], expected[at:used])


@pytest.mark.parametrize("counts", [[700, 0, 33, 128, 5], [256, 257, 320, 321, 64], [2700, 1], [0]], ids=str)
def test_every_row_and_column_is_in_one_tile(counts):
    columns, height = 3, 128
    rows, experts, seen = sum(counts) + 20, len(counts), set()
    groups = grouped.build_groups(torch.tensor(counts), rows, 128).tolist()
    at = grouped.entries_offset(experts)
    owner = [expert for expert, count in enumerate(counts) for _ in range(count)] + [-1] * 20
    for tile in range(groups[experts + 1] * columns):
        expert, leader, together, first, end = groups[at + tile // columns * 8 :][:5]
        place = tile - leader * columns
        row = first + place % together * height
        for one in range(row, min(end, row + height)):
            assert owner[one] == expert
            assert (one, place // together) not in seen
            seen.add((one, place // together))
    assert len(seen) == rows * columns


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("counts", SPREADS[:3], ids=str)
def test_results_and_gradients(counts, activation, dtype):
    torch.manual_seed(0)
    rows, weight = made(counts, 24, 40, dtype, behind=3)
    given = counts_of(counts)
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda rows, weight: kernels.grouped_gemm(rows, weight, given, activation=activation),
            lambda rows, weight: kernels.grouped_gemm.reference(rows, weight, given, activation=activation),
            [rows, weight],
            by_exp=activation is not None,
        )


@pytest.mark.slow
@settings(max_examples=15)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    behind=st.integers(0, 5),
    columns=st.integers(1, 20),
    depth=st.integers(1, 40),
    activation=st.sampled_from([None, "silu"]),
    layout=st.integers(0, 4),
)
def test_any_shape_and_layout(counts, behind, columns, depth, activation, layout):
    rows, weight = made(counts, 2 * columns, depth, behind=behind)
    given = counts_of(counts)
    width = columns if activation else 2 * columns
    ways = [list(layouts(one)) for one in (rows, weight, torch.randn(len(rows), width, device=DEVICE))]
    x, matrix, upstream = (way[layout % len(way)][1] for way in ways)

    def call(rows, weight):
        return kernels.grouped_gemm(rows, weight, given, activation=activation)

    with kernels.using("require"):
        actual = gradients(call, [x, matrix], upstream)
    with kernels.using("off"):
        expected = gradients(call, [rows, weight], upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert not actual[0][len(rows) - behind :].any()


@pytest.mark.parametrize("upstream", ["expanded", "one"])
def test_gradients_that_are_expanded(upstream):
    counts = counts_of([3, 4])
    rows, weight = made([3, 4], 6, 8)
    given = torch.randn(1, 6, device=DEVICE).expand(7, 6) if upstream == "expanded" else torch.ones(1, 1, device=DEVICE)
    given = given.expand(7, 6)
    with kernels.using("require"):
        actual = gradients(lambda *xs: kernels.grouped_gemm(*xs, counts), [rows, weight], given)
    expected = gradients(lambda *xs: kernels.grouped_gemm.reference(*xs, counts), [rows, weight], given)
    torch.testing.assert_close(actual, expected)


def test_experts_without_rows_have_gradients_of_zeros():
    rows, weight = made([0, 4, 0], 8, 8)
    weight.requires_grad_()
    with kernels.using("require"):
        kernels.grouped_gemm(rows, weight, counts_of([0, 4, 0])).sum().backward()
    assert not weight.grad[0].any()
    assert not weight.grad[2].any()
    assert weight.grad[1].any()


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_nothing(rows, columns, depth, activation):
    x = torch.ones(rows, depth, device=DEVICE, requires_grad=True)
    weight = torch.ones(2, columns, depth, device=DEVICE, requires_grad=True)
    with kernels.using("require"):
        result = kernels.grouped_gemm(x, weight, counts_of([rows, 0]), activation=activation)
        result.sum().backward()
    assert result.shape == (rows, columns // (2 if activation else 1))
    assert not result.any()
    assert not x.grad.any()
    assert not weight.grad.any()


def test_rows_of_nobody_do_not_matter():
    rows, weight = made([4, 3], 8, 8, behind=2)
    rows[7:] = float("nan")
    rows.requires_grad_()
    weight.requires_grad_()
    with kernels.using("require"):
        result = kernels.grouped_gemm(rows, weight, counts_of([4, 3]), activation="silu")
        result.sum().backward()
    assert not result[7:].any()
    assert not rows.grad[7:].any()
    assert weight.grad.isfinite().all()


def test_rows_of_one_expert_do_not_touch_those_of_another():
    rows, weight = made([4, 3], 8, 8)
    weight[1] = float("inf")
    rows[5] = float("nan")
    weight.requires_grad_()
    with kernels.using("require"):
        result = kernels.grouped_gemm(rows, weight, counts_of([4, 3]))
        result[:4].sum().backward()
    assert result[:4].isfinite().all()
    assert weight.grad[0].isfinite().all()


@pytest.mark.slow
def test_float32_keeps_what_rounding_takes():
    """Behind 2**24, rounding takes each 1 from a sum of float32: of a row by a matrix, and of gradients of rows."""
    large = torch.zeros(544, 1, device=DEVICE)
    large[0] = 2**24
    large[32::32] = 1
    rows, weight, counts = large.T.repeat(2, 1), torch.ones(2, 4, 544, device=DEVICE), counts_of([1, 1])
    small = torch.zeros_like(weight)
    small[:, :, 32] = 64  # silu leaves 64 as it is
    with kernels.using("require"):
        assert kernels.grouped_gemm(rows, weight, counts).tolist() == [[2**24 + 16] * 4] * 2
        for factors in ((weight, small), (small, weight)):
            found = kernels.grouped_gemm(rows, torch.cat(factors, 1), counts, activation="silu")
            assert found.tolist() == [[64 * (2**24 + 16)] * 4] * 2
    groups = grouped.group_rows(counts_of([544]), 544, 128)
    assert grouped_triton.weight_gradient(torch.ones_like(large), large, groups, 1).item() == 2**24 + 16


def test_what_is_infinite_stays_so():
    rows, weight = made([3, 3], 5, 80)
    rows[0, 3], rows[1, 70], rows[4, 2], rows[4, 60] = float("inf"), float("-inf"), float("inf"), float("-inf")
    weight = weight.abs()
    with kernels.using("require"):
        found = kernels.grouped_gemm(rows, weight, counts_of([3, 3]))
    expected = torch.cat((rows[:3] @ weight[0].T, rows[3:] @ weight[1].T))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_groups_for_several_products():
    counts = counts_of([5, 0, 9])
    rows, weight = made([5, 0, 9], 8, 16)
    with kernels.using("require"):
        groups = kernels.row_groups(counts, rows=14)
        assert torch.equal(
            kernels.grouped_gemm(rows, weight, counts, groups=groups), kernels.grouped_gemm(rows, weight, counts)
        )
        with pytest.raises(UsageError, match="13 rows and 3 experts"):
            kernels.grouped_gemm(rows[:13], weight, counts, groups=groups[:-8])


@pytest.mark.parametrize("mean", [1, 4, 12, 60])
def test_tiles_of_all_heights(mean):
    torch.manual_seed(0)
    counts = torch.randint(0, 2 * mean + 1, (6,)).tolist()
    rows, weight = made(counts, 40, 24)
    with kernels.using("require"):
        actual = kernels.grouped_gemm(rows, weight, counts_of(counts))
    torch.testing.assert_close(actual, kernels.grouped_gemm.reference(rows, weight, counts_of(counts)))
    assert {grouped.tile_height(6 * rows, 6) for rows in (1, 9, 20, 60, 200)} == {16, 32, 64, 128}


def of_tokens(counts, columns, dtype=torch.float32, behind=3):
    """Tokens, the token of each row, and these rows. Tokens that nobody takes are no numbers."""
    taken = sum(counts) // 2 + 1
    tokens = torch.randn(taken + 2, columns, device=DEVICE).to(dtype)
    sources = torch.randint(taken, (sum(counts) + behind,), dtype=torch.int32, device=DEVICE)
    sources[sum(counts) :] = taken  # of choices that were dropped
    rows = tokens[sources.long()]
    tokens[taken:] = float("nan")
    return tokens, sources, rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", SPREADS, ids=str)
def test_tokens_give_what_their_copies_give(counts, dtype):
    """To the bit: wherever rows are, they are multiplied in the same order."""
    torch.manual_seed(0)
    tokens, sources, rows = of_tokens(counts, 40, dtype)
    weight = (torch.randn(len(counts), 24, 40, device=DEVICE) / 40**0.5).to(dtype)
    upstream = torch.randn(len(rows), 24, device=DEVICE).to(dtype)
    groups, experts = grouped.group_rows(counts_of(counts), len(rows), 32), len(counts)
    for matrices, transposed in ((weight, False), (weight.mT.contiguous(), True)):
        found = grouped_triton.multiply(tokens, matrices, groups, 32, transposed, sources)
        assert torch.equal(found, grouped_triton.multiply(rows, matrices, groups, 32, transposed))
    for keep in (False, True):
        found = grouped_triton.multiply_gated(tokens, weight, groups, 32, "silu", keep, sources)
        assert all(map(torch.equal, found, grouped_triton.multiply_gated(rows, weight, groups, 32, "silu", keep)))
    found = grouped_triton.weight_gradient(upstream, tokens, groups, experts, sources, "rows")
    assert torch.equal(found, grouped_triton.weight_gradient(upstream, rows, groups, experts))
    found = grouped_triton.weight_gradient(tokens, upstream, groups, experts, sources, "gradient")
    assert torch.equal(found, grouped_triton.weight_gradient(rows, upstream, groups, experts))


@pytest.mark.parametrize("mode", ["require", "off"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_products_of_tokens(activation, mode):
    torch.manual_seed(0)
    counts = [5, 0, 9, 2]
    tokens, sources, rows = of_tokens(counts, 40)
    weight, given = torch.randn(4, 24, 40, device=DEVICE), counts_of(counts)
    expected = kernels.grouped_gemm.reference(rows, weight, given, activation=activation)
    with kernels.using(mode):
        actual = kernels.grouped_gemm(tokens, weight, given, activation=activation, sources=sources)
        for one in (sources[None], sources.long()):
            with pytest.raises(UsageError, match="int32, as sort_tokens"):
                kernels.grouped_gemm(tokens, weight, given, sources=one)
    torch.testing.assert_close(actual, expected)
    assert not actual[16:].any()


def test_products_of_tokens_have_gradients_by_torch():
    torch.manual_seed(0)
    counts = [5, 0, 9]
    tokens, sources, rows = of_tokens(counts, 12, behind=0)
    weight, given, upstream = torch.randn(3, 8, 12, device=DEVICE), counts_of(counts), torch.randn(14, 8, device=DEVICE)

    def call(tokens, weight):
        return kernels.grouped_gemm(tokens, weight, given, sources=sources)

    tokens.requires_grad_()
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="no gradients"):
        call(tokens, weight)
    actual = gradients(call, [tokens, weight], upstream)
    copies = gradients(lambda rows, weight: kernels.grouped_gemm(rows, weight, given), [rows, weight], upstream)
    torch.testing.assert_close(actual[0], copies[0])
    torch.testing.assert_close(actual[1][1], copies[1][1])
    expected = torch.zeros_like(tokens).index_add(0, sources.long(), copies[1][0])
    torch.testing.assert_close(actual[1][0], expected)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("blocks", [False, True])
def test_tokens_of_fp8(blocks, activation):
    """Each has the scale of its token."""
    torch.manual_seed(0)
    counts = [5, 0, 20, 3]
    _, sources, _ = of_tokens(counts, 1)
    tokens, weight = torch.randn(17, 64, device=DEVICE), torch.randn(4, 256, 64, device=DEVICE)
    tokens, scales = kernels.quantize(tokens, block=(1, 128) if blocks else "row")
    if blocks:
        weight, weight_scales = kernels.quantize(weight, block=(128, 128))
    else:
        weight, weight_scales = (weight * 64).to(FP8), torch.rand(4, device=DEVICE)
    options = {"activation": activation, "weight_scales": weight_scales, "dtype": torch.float32}
    given = (weight, counts_of(counts))
    with kernels.using("require"):
        found = kernels.grouped_gemm(tokens, *given, sources=sources, row_scales=scales, **options)
        copies, copied = tokens[sources.long()], scales[sources.long()]
        assert torch.equal(found, kernels.grouped_gemm(copies, *given, row_scales=copied, **options))


@pytest.mark.parametrize("layout", range(1, 5))
def test_tokens_in_any_layout(layout):
    torch.manual_seed(0)
    counts = [5, 0, 9]
    tokens, sources, rows = of_tokens(counts, 12)
    tokens = list(layouts(tokens))[layout][1]
    weight, upstream = torch.randn(3, 8, 12, device=DEVICE), torch.randn(len(rows), 8, device=DEVICE)
    groups = grouped.group_rows(counts_of(counts), len(rows), 16)
    found = grouped_triton.multiply(tokens, weight, groups, 16, False, sources)
    assert torch.equal(found, grouped_triton.multiply(rows, weight, groups, 16, False))
    found = grouped_triton.weight_gradient(upstream, tokens, groups, 3, sources, "rows")
    assert torch.equal(found, grouped_triton.weight_gradient(upstream, rows, groups, 3))


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(48, 64), (150, 300)])
def test_fp8(columns, depth, blocks, activation):
    torch.manual_seed(0)
    counts = [5, 0, 20, 3]
    rows, weight = made(counts, 2 * columns, depth, behind=2)
    if blocks:
        rows, row_scales = kernels.quantize(rows, block=(1, 128))
        weight, weight_scales = kernels.quantize(weight, block=(128, 128))
    else:
        rows, row_scales = kernels.quantize(rows, block="row")
        weight_scales = weight.abs().amax((1, 2)) / 448
        weight = (weight / weight_scales[:, None, None]).to(FP8)
    given = (rows, weight, counts_of(counts))
    options = {"activation": activation, "row_scales": row_scales, "weight_scales": weight_scales}
    with kernels.using("require"):
        actual = kernels.grouped_gemm(*given, **options, dtype=torch.float32)
        assert kernels.grouped_gemm(*given, **options).dtype == BF16
    low = kernels.grouped_gemm.reference(*given, **options, dtype=torch.float32)
    wide = [
        grouped.dequantize_rows(rows, row_scales).double(),
        grouped.dequantize_weight(weight, weight_scales).double(),
    ]
    exact = kernels.grouped_gemm.reference(*wide, counts_of(counts), activation=activation)
    assert_as_exact(actual, exact, low, by_exp=True)


def test_rows_beyond_32_bits():
    stride = 2**31 + 16
    far = torch.empty(stride + 24, dtype=BF16, device=DEVICE).as_strided((2, 24), (stride, 1))
    near, weight = made([1, 1], 16, 24, BF16)
    far.copy_(near)
    upstream = torch.randn(2, 16, device=DEVICE)
    with kernels.using("require"):
        actual, wanted = (
            gradients(lambda *xs: kernels.grouped_gemm(*xs, counts_of([1, 1])), [x, weight], upstream)
            for x in (far, near)
        )
    assert torch.equal(actual[0], wanted[0])
    assert all(map(torch.equal, actual[1], wanted[1]))


def test_tokens_beyond_32_bits():
    stride = 2**31 + 16
    far = torch.empty(stride + 24, dtype=BF16, device=DEVICE).as_strided((2, 24), (stride, 1))
    near, weight = made([1, 1], 16, 24, BF16)
    far.copy_(near)
    assert not grouped_triton.can_gather_sm90(far)
    sources, upstream = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE), torch.randn(3, 16, device=DEVICE)
    upstream = upstream.to(BF16)
    groups = grouped.group_rows(counts_of([1, 2]), 3, 16)
    actual, wanted = (
        (
            grouped_triton.multiply(x, weight, groups, 16, False, sources),
            grouped_triton.weight_gradient(upstream, x, groups, 2, sources, "rows"),
        )
        for x in (far, near)
    )
    assert all(map(torch.equal, actual, wanted))


def test_matrices_beyond_32_bits():
    stride = 2**31 + 16
    memory = torch.empty(stride + 16 * 24, dtype=BF16, device=DEVICE)
    far = memory.as_strided((2, 16, 24), (stride, 24, 1))
    rows, near = made([2, 3], 16, 24, BF16)
    far.copy_(near)
    with kernels.using("require"):
        actual, wanted = (kernels.grouped_gemm(rows, weight, counts_of([2, 3])) for weight in (far, near))
    assert torch.equal(actual, wanted)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_of_the_reference(activation):
    counts = torch.tensor([2, 0, 1])
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *xs: kernels.grouped_gemm(*xs, counts, activation=activation), (rows, weight)
    )
    with kernels.using("off"):
        assert torch.autograd.gradgradcheck(
            lambda *xs: kernels.grouped_gemm(*xs, counts, activation=activation), (rows, weight)
        )


@pytest.mark.slow
def test_the_operators_are_of_torch():
    counts = counts_of([3, 0, 2])
    rows, weight = made([3, 0, 2], 8, 12)
    height = grouped.tile_height(5, 3)
    groups = kernels.row_groups(counts, rows=5)
    named = torch.ops.nearpeak
    opcheck(named.group_rows.default, (counts, 5, height), test_utils=("test_schema", "test_faketensor"))
    leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    opcheck(named.grouped_gemm.default, (*leaves, groups, height, False))
    opcheck(named.grouped_gemm.default, (leaves[0], leaves[1].detach().mT.contiguous(), groups, height, True))
    opcheck(named.grouped_gemm_gated.default, (*leaves, groups, height, "silu", True))
    opcheck(named.grouped_weight_gradient.default, (torch.randn(5, 8, device=DEVICE), rows, groups, 3))
    scales = torch.ones(5, device=DEVICE), torch.ones(3, device=DEVICE)
    fp8 = (rows.to(FP8), weight.to(FP8), *scales, groups, height, "", BF16)
    tokens = torch.tensor([4, 0, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    for sources in (None, tokens):  # others of the checks multiply fp8 in torch
        opcheck(named.grouped_gemm_fp8.default, (*fp8, sources), test_utils=("test_faketensor",))


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    counts = counts_of([3, 0, 2])
    rows, weight = made([3, 0, 2], 8, 12)
    rows.requires_grad_()
    weight.requires_grad_()

    def layer(rows, weight):
        return kernels.grouped_gemm(rows * 2, weight, counts, activation="silu").sin().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(rows, weight), (rows, weight))
    torch.testing.assert_close(actual, torch.autograd.grad(layer(rows, weight), (rows, weight)))


def test_what_it_does_not_take():
    rows, weight = made([2, 1], 8, 12)
    counts = counts_of([2, 1])
    assert "float64" in kernels.supports(kernels.grouped_gemm, rows.double(), weight.double(), counts).reason
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="one dtype"):
        kernels.grouped_gemm(rows.to(BF16), weight, counts)
    with pytest.raises(UsageError, match=r"\(3, 12\) and \(2, 8, 11\)"):
        kernels.grouped_gemm(rows, weight[..., :11], counts)
    with pytest.raises(UsageError, match="2 experts"):
        kernels.grouped_gemm(rows, weight, counts[:1])
    with pytest.raises(UsageError, match="silu"):
        kernels.grouped_gemm(rows, weight, counts, activation="silo")
    with pytest.raises(UsageError, match="not 7"):
        kernels.grouped_gemm(rows, weight[:, :7], counts, activation="silu")
    with pytest.raises(UsageError, match="one of them"):
        kernels.grouped_gemm(rows, weight, counts, row_scales=rows[:, 0])
    with pytest.raises(UsageError, match="have the shapes"):
        kernels.grouped_gemm(rows, weight, counts, row_scales=rows[:, 0], weight_scales=rows[:, 0])
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        kernels.grouped_gemm(rows, weight, counts, row_scales=rows[:, 0], weight_scales=weight[:, 0, 0])
    with pytest.raises(UsageError, match="count per expert"):
        kernels.row_groups(counts.float(), rows=3)


@pytest.mark.slow
def test_candidates_compute_the_same():
    torch.manual_seed(0)
    counts = counts_of([30, 0, 9])
    rows, weight = made([30, 0, 9], 100, 90, BF16)
    groups = grouped.group_rows(counts, 39, 64)
    expected = grouped_triton.multiply(rows, weight, groups, 64, False)
    assert len(grouped_candidates(128)) >= 10
    for config in grouped_candidates(64):
        torch.testing.assert_close(grouped_triton.multiply(rows, weight, groups, 64, False, config=config), expected)
    assert all(config in grouped_candidates(64) for config in grouped_candidates(64, gated=True))


def test_a_configuration_of_hopper_says_nothing_to_the_portable_kernel():
    torch.manual_seed(0)
    counts = counts_of([30, 0, 9])
    rows, weight = made([30, 0, 9], 101, 90, BF16)  # 101 columns: no kernel for Hopper takes them
    groups = grouped.group_rows(counts, 39, 128)
    expected = grouped_triton.multiply(rows, weight, groups, 128, False)
    gradient = grouped_triton.weight_gradient(expected, rows, groups, 3)
    for config in SM90_GROUPED_CONFIGS:
        assert torch.equal(grouped_triton.multiply(rows, weight, groups, 128, False, config=config), expected)
    for config in SM90_GROUPED_GRADIENT_CONFIGS:
        assert torch.equal(grouped_triton.weight_gradient(expected, rows, groups, 3, config=config), gradient)
