"""`permute_tokens` and `unpermute_tokens`: the order, the sums, all gradients, and experts that nobody chose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_kernel_is_exact, gradients, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")

from nearpeak.kernels.moe import triton as jit


def chosen(tokens, k, number, *, dropped=True, dtype=torch.int64):
    return torch.randint(-1 if dropped else 0, number, (tokens, k), device=DEVICE, dtype=dtype)


def assert_permuted(x, experts, number):
    with kernels.using("require"):
        rows, counts, row_map = kernels.permute_tokens(x, experts, number_of_experts=number)
    flat = [(expert, index) for index, expert in enumerate(experts.reshape(-1).tolist())]
    kept = sorted((expert, index) for expert, index in flat if 0 <= expert < number)
    choices = experts.shape[1]
    assert counts.tolist() == [sum(expert == one for expert, _ in kept) for one in range(number)]
    assert counts.dtype == row_map.dtype == torch.int32
    expected = torch.zeros(len(flat), x.shape[1], dtype=x.dtype, device=x.device)
    places = row_map.reshape(-1).tolist()
    for row, (_, index) in enumerate(kept):
        expected[row] = x[index // choices]
        assert places[index] == row
    assert all(place < 0 for (expert, _), place in zip(flat, places, strict=True) if not 0 <= expert < number)
    assert torch.equal(rows, expected)
    for actual, by_torch in zip(
        (rows, counts, row_map), kernels.permute_tokens.reference(x, experts, number_of_experts=number), strict=True
    ):
        assert torch.equal(actual, by_torch)
    assert_sources(experts, number, counts, row_map)
    return rows, row_map


def assert_sources(experts, number, counts, row_map):
    """Each row is that of a token, the rows of dropped choices too."""
    with kernels.using("require"):
        *others, sources = kernels.sort_tokens(experts, number_of_experts=number)
    assert all(map(torch.equal, others, (counts, row_map)))
    assert sources.dtype == torch.int32
    expected = torch.full_like(sources, -1)
    for token, places in enumerate(row_map.tolist()):
        for place in places:
            expected[place if place >= 0 else ~place] = token
    assert torch.equal(sources, expected)
    assert torch.equal(sources, kernels.sort_tokens.reference(experts, number_of_experts=number)[2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "k", "number"), [(5, 2, 4), (200, 3, 7), (1, 1, 1), (0, 2, 4), (150, 1, 300), (40, 8, 8), (3, 20, 2)]
)
def test_the_order_is_that_of_experts_and_then_of_tokens(tokens, k, number, dtype):
    torch.manual_seed(0)
    assert_permuted(torch.randn(tokens, 24, device=DEVICE), chosen(tokens, k, number, dtype=dtype), number)


@pytest.mark.parametrize("expert", [0, 2, 4, -1, 5, -(2**40), 2**40])
def test_all_tokens_to_one_expert_or_to_none(expert):
    experts = torch.full((33, 2), expert, device=DEVICE)
    rows, row_map = assert_permuted(torch.randn(33, 8, device=DEVICE), experts, 5)
    total = kernels.unpermute_tokens(rows, row_map)
    assert total.any() == (0 <= expert < 5)


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 20),
    k=st.integers(1, 4),
    number=st.integers(1, 6),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    layout=st.integers(0, 4),
)
def test_any_shape_and_layout(tokens, k, number, columns, dtype, layout):
    x = torch.randn(tokens, columns, device=DEVICE).to(dtype)
    ways = list(layouts(x))
    x = ways[layout % len(ways)][1]
    experts = chosen(k, tokens, number).t() if layout % 2 else chosen(tokens, k, number)
    rows, row_map = assert_permuted(x, experts, number)
    with kernels.using("require"):
        back = kernels.unpermute_tokens(rows, row_map)
    times = ((experts >= 0) & (experts < number)).sum(1, keepdim=True)
    torch.testing.assert_close(back.float(), x.float() * times, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize(("tokens", "k", "columns"), [(9, 3, 40), (4, 1, 7), (2, 18, 33)])
def test_sums_and_their_gradients(tokens, k, columns, dtype, weights_dtype):
    torch.manual_seed(0)
    _, row_map = kernels.permute_tokens.reference(
        torch.ones(tokens, 1), chosen(tokens, k, 4).cpu(), number_of_experts=4
    )[1:]
    row_map = row_map.to(DEVICE)
    inputs = [torch.randn(tokens * k, columns, device=DEVICE).to(dtype)]
    if weights_dtype is not None:
        inputs.append(torch.rand(tokens, k, device=DEVICE).to(weights_dtype))
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda rows, weights=None: kernels.unpermute_tokens(rows, row_map, weights),
            lambda rows, weights=None: kernels.unpermute_tokens.reference(rows, row_map, weights),
            inputs,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_tokens(dtype):
    torch.manual_seed(0)
    x, experts = torch.randn(9, 33, device=DEVICE).to(dtype), chosen(9, 3, 4)
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda x: kernels.permute_tokens(x, experts, number_of_experts=4)[0],
            lambda x: kernels.permute_tokens.reference(x, experts, number_of_experts=4)[0],
            [x],
        )


@pytest.mark.slow
def test_gradients_in_any_layout():
    torch.manual_seed(0)
    x, experts, weights = torch.randn(6, 10, device=DEVICE), chosen(6, 2, 3), torch.rand(6, 2, device=DEVICE)
    rows, _, row_map = kernels.permute_tokens(x, experts, number_of_experts=3)

    def weighted(rows, weights):
        return kernels.unpermute_tokens(rows, row_map, weights)

    for _, upstream in [
        *layouts(torch.randn(6, 10, device=DEVICE)),
        ("one", torch.ones(1, 1, device=DEVICE).expand(6, 10)),
    ]:
        for _, way in list(layouts(rows))[1:4]:
            actual = gradients(weighted, [way, weights.t().contiguous().t()], upstream)
            with kernels.using("off"):
                expected = gradients(weighted, [rows, weights], upstream)
            torch.testing.assert_close(actual, expected)


def test_rows_that_are_dropped_do_not_matter():
    experts = torch.tensor([[0, -1], [-1, -1]], device=DEVICE)
    x = torch.ones(2, 8, device=DEVICE)
    rows, _, row_map = kernels.permute_tokens(x, experts, number_of_experts=2)
    rows[1:] = float("nan")
    rows.requires_grad_()
    weights = torch.tensor([[2.0, float("inf")], [float("nan"), 1.0]], device=DEVICE, requires_grad=True)
    with kernels.using("require"):
        result = kernels.unpermute_tokens(rows, row_map, weights)
        result.sum().backward()
    assert result.tolist() == [[2.0] * 8, [0.0] * 8]
    assert rows.grad.tolist() == [[2.0] * 8, *[[0.0] * 8] * 3]
    assert weights.grad.tolist() == [[8.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("columns", [5000, 8192])
def test_wide_rows(columns):
    torch.manual_seed(0)
    x, experts, weights = torch.randn(2, columns, device=DEVICE), chosen(2, 2, 3), torch.rand(2, 2, device=DEVICE)
    rows, row_map = assert_permuted(x, experts, 3)
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda rows, weights: kernels.unpermute_tokens(rows, row_map, weights),
            lambda rows, weights: kernels.unpermute_tokens.reference(rows, row_map, weights),
            [rows, weights],
        )


def test_parts_of_several_steps(monkeypatch):
    monkeypatch.setattr(jit, "_SORT_PARTS", 3)
    torch.manual_seed(0)
    assert_permuted(torch.randn(1500, 1, device=DEVICE), chosen(1500, 1, 5), 5)


def test_gradients_of_the_reference():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    experts = torch.tensor([[0, 1], [2, -1], [1, 1]])

    def there_and_back(x, weights):
        rows, _, row_map = kernels.permute_tokens(x, experts, number_of_experts=3)
        return kernels.unpermute_tokens(rows.sin(), row_map, weights)

    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_rows_beyond_32_bits():
    """Rows so far from each other that the second one is beyond 2**31 elements; the memory between is never touched."""
    stride = 2**31 + 16
    memory = torch.empty(stride + 24, dtype=torch.bfloat16, device=DEVICE)
    far = memory.as_strided((2, 24), (stride, 1))
    near = torch.randn(2, 24, device=DEVICE).bfloat16()
    far.copy_(near)
    experts = torch.tensor([[1], [0]], device=DEVICE)
    assert_permuted(far, experts, 2)
    _, _, row_map = kernels.permute_tokens(near, experts, number_of_experts=2)
    weights = torch.rand(2, 1, device=DEVICE)
    upstream = torch.randn(2, 24, device=DEVICE)
    with kernels.using("require"):
        actual = gradients(
            lambda rows, weights: kernels.unpermute_tokens(rows, row_map, weights), [far, weights], upstream
        )
        wanted = gradients(
            lambda rows, weights: kernels.unpermute_tokens(rows, row_map, weights), [near, weights], upstream
        )
    assert torch.equal(actual[0], wanted[0])
    assert all(map(torch.equal, actual[1], wanted[1]))


@pytest.mark.slow
def test_the_operators_are_of_torch():
    x = torch.randn(5, 12, device=DEVICE, requires_grad=True)
    experts = chosen(5, 2, 3)
    opcheck(torch.ops.nearpeak.sort_tokens.default, (experts, 3))
    _, _, row_map = kernels.permute_tokens(x.detach(), experts, number_of_experts=3)
    opcheck(torch.ops.nearpeak.permute_rows.default, (x, row_map))
    rows = torch.randn(10, 12, device=DEVICE, requires_grad=True)
    weights = torch.rand(5, 2, device=DEVICE, requires_grad=True)
    opcheck(torch.ops.nearpeak.unpermute_rows.default, (rows, row_map, weights))
    opcheck(torch.ops.nearpeak.unpermute_rows.default, (rows, row_map, None))
    detached = (torch.randn(5, 12, device=DEVICE), rows.detach(), row_map, weights.detach())
    opcheck(torch.ops.nearpeak.unpermute_rows_backward.default, detached)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    experts = chosen(6, 2, 3)

    def layer(x, weights):
        rows, _, row_map = kernels.permute_tokens(x, experts, number_of_experts=3)
        return kernels.unpermute_tokens(rows * 2, row_map, weights).sin().sum()

    x, weights = (
        torch.randn(6, 8, device=DEVICE, requires_grad=True),
        torch.rand(6, 2, device=DEVICE, requires_grad=True),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x, weights), (x, weights))
    torch.testing.assert_close(actual, torch.autograd.grad(layer(x, weights), (x, weights)))


def test_what_it_does_not_take_runs_the_reference():
    x = torch.randn(3, 4, dtype=torch.float64, device=DEVICE)
    experts = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    assert "float64" in kernels.supports(kernels.permute_tokens, x, experts, number_of_experts=1).reason
    assert torch.equal(kernels.permute_tokens(x, experts, number_of_experts=1)[0], x)
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="4094 experts"):
        kernels.permute_tokens(x.float(), experts, number_of_experts=5000)


def test_calls_that_make_no_sense():
    x, experts = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"\(3, 4\) and \(2, 2\)"):
        kernels.permute_tokens(x, experts[:2], number_of_experts=2)
    with pytest.raises(UsageError, match="float32"):
        kernels.permute_tokens(x, experts.float(), number_of_experts=2)
    with pytest.raises(UsageError, match="number_of_experts"):
        kernels.permute_tokens(x, experts, number_of_experts=0)
    row_map = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(UsageError, match=r"\(3, 4\) and \(3, 2\)"):
        kernels.unpermute_tokens(x, row_map)
    with pytest.raises(UsageError, match=r"weights.*\(2, 3\)"):
        kernels.unpermute_tokens(torch.ones(6, 4), row_map, torch.ones(2, 3))


def test_candidates_compute_the_same():
    x, experts, weights = torch.randn(3, 600, device=DEVICE), chosen(3, 2, 2), torch.rand(3, 2, device=DEVICE)
    rows, _, row_map = kernels.permute_tokens(x, experts, number_of_experts=2)
    total = kernels.unpermute_tokens(rows, row_map)
    assert len(jit.permute_candidates(7168)) >= 10
    for config in jit.permute_candidates(600):
        assert torch.equal(jit.permute_rows(x, row_map, config=config), rows)
        assert torch.equal(jit.unpermute_rows(rows, row_map, None, config=config), total)
    expected = jit.unpermute_rows_backward(x, rows, row_map, weights)
    for config in jit.unpermute_backward_candidates(600):
        torch.testing.assert_close(jit.unpermute_rows_backward(x, rows, row_map, weights, config=config), expected)


@pytest.mark.gpu
def test_a_large_layer_a_hundred_times():
    torch.manual_seed(0)
    x, experts = torch.randn(16384, 7168, device=DEVICE).bfloat16(), chosen(16384, 8, 256)
    weights = torch.rand(16384, 8, device=DEVICE)
    rows, counts, row_map = kernels.permute_tokens(x, experts, number_of_experts=256)
    expected = kernels.permute_tokens.reference(x, experts, number_of_experts=256)
    assert all(map(torch.equal, (rows, counts, row_map), expected))
    total = kernels.unpermute_tokens(rows, row_map, weights)
    torch.testing.assert_close(total, kernels.unpermute_tokens.reference(rows, row_map, weights))
    for _ in range(100):
        again = kernels.permute_tokens(x, experts, number_of_experts=256)
        assert torch.equal(again[2], row_map)
        assert torch.equal(again[0], rows)
        assert torch.equal(kernels.unpermute_tokens(again[0], row_map, weights), total)


@pytest.mark.gpu
def test_recorded_and_compiled():
    x, experts = torch.randn(512, 1024, device=DEVICE).bfloat16(), chosen(512, 4, 16)

    def layer(x, experts):
        rows, counts, row_map = kernels.permute_tokens(x, experts, number_of_experts=16)
        return kernels.unpermute_tokens(rows * 2, row_map), counts

    layer(x, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(x, experts)
    x.normal_()
    experts.copy_(chosen(512, 4, 16))
    graph.replay()
    assert all(map(torch.equal, recorded, layer(x, experts)))
    assert all(map(torch.equal, torch.compile(layer, fullgraph=True)(x, experts), layer(x, experts)))
