"""`route`: which experts, with which weights, and the gradient of the logits."""

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

WAYS = [
    {"scores": "softmax"},
    {"scores": "softmax", "renormalize": True},
    {"scores": "sigmoid", "scale": 2.5},
    {"scores": "sigmoid", "renormalize": True, "scale": 2.5},
]


def logits_of(tokens, experts, dtype=torch.float32):
    """Scores of which no two of a token are equal, also in 16 bits."""
    order = torch.rand(tokens, experts, device=DEVICE).argsort(1)
    return (order.float() / experts * 6.0 - 3.0).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(9, 8, 2), (5, 33, 5), (3, 1, 1), (2, 128, 8), (0, 4, 2)])
def test_weights_and_gradients(tokens, experts, k, way, dtype):
    torch.manual_seed(0)
    logits = logits_of(tokens, experts, dtype)
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda logits: kernels.route(logits, k, **way),
            lambda logits: kernels.route.reference(logits, k, **way),
            [logits],
            torch.randn(tokens, k, device=DEVICE),
            by_exp=True,
        )
        weights, chosen = kernels.route(logits, k, **way)
    assert torch.equal(chosen, kernels.route.reference(logits, k, **way)[1])
    assert weights.dtype == torch.float32
    assert chosen.dtype == torch.int32


def test_the_best_come_first_and_of_equal_ones_the_first():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-0.0, 0.0, -9.0, 0.0]], device=DEVICE)
    with kernels.using("require"):
        _, chosen = kernels.route(logits, 3)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 3]]


def test_all_experts_are_chosen_once():
    logits = torch.randn(20, 16, device=DEVICE)
    with kernels.using("require"):
        weights, chosen = kernels.route(logits, 16)
    assert torch.equal(chosen.sort(1).values, torch.arange(16, device=DEVICE, dtype=torch.int32).expand(20, 16))
    torch.testing.assert_close(weights.sum(1), torch.ones(20, device=DEVICE))
    assert (weights[:, :-1] >= weights[:, 1:]).all()


def test_a_bias_counts_for_the_choice_alone():
    torch.manual_seed(0)
    logits, bias = logits_of(30, 12), torch.randn(12, device=DEVICE)
    for way in WAYS:
        with kernels.using("require"):
            weights, chosen = kernels.route(logits, 3, bias=bias, **way)
        expected = kernels.route.reference(logits, 3, bias=bias, **way)
        assert torch.equal(chosen, expected[1])
        torch.testing.assert_close(weights, expected[0])
    plain = kernels.route(logits, 3, scores="sigmoid")
    assert not torch.equal(plain[1], kernels.route(logits, 3, scores="sigmoid", bias=bias)[1])


def test_renormalized_weights_are_a_softmax_of_what_was_chosen():
    logits = torch.randn(10, 20, device=DEVICE)
    with kernels.using("require"):
        weights, chosen = kernels.route(logits, 4, renormalize=True)
    torch.testing.assert_close(weights, logits.gather(1, chosen.long()).softmax(1))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_what_is_not_finite_chooses_experts_that_there_are(scores):
    logits = torch.randn(4, 6, device=DEVICE)
    logits[0, 3] = float("nan")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, :5] = -200.0
    with kernels.using("require"):
        weights, chosen = kernels.route(logits, 3, scores=scores, renormalize=True)
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert chosen[3, 0] == 5
    torch.testing.assert_close(weights[3], torch.tensor([1.0, 0.0, 0.0], device=DEVICE))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    tokens=st.integers(0, 20),
    experts=st.integers(1, 40),
    k=st.integers(1, 40),
    way=st.sampled_from(WAYS),
    layout=st.integers(0, 4),
)
def test_any_shape_and_layout(tokens, experts, k, way, layout):
    k = min(k, experts)
    logits = logits_of(tokens, experts)
    ways = list(layouts(logits))
    given = ways[layout % len(ways)][1]
    upstream = list(layouts(torch.randn(tokens, k, device=DEVICE)))[layout % len(ways)][1]
    with kernels.using("require"):
        actual = gradients(lambda logits: kernels.route(logits, k, **way), [given], upstream)
    expected = gradients(lambda logits: kernels.route.reference(logits, k, **way), [logits], upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_that_are_expanded():
    logits = torch.randn(5, 7, device=DEVICE)
    upstream = torch.ones(1, 1, device=DEVICE).expand(5, 3)
    with kernels.using("require"):
        actual = gradients(lambda logits: kernels.route(logits, 3), [logits], upstream)
    expected = gradients(lambda logits: kernels.route.reference(logits, 3), [logits], upstream)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_of_the_reference(way):
    torch.manual_seed(0)
    logits = logits_of(3, 5).double().cpu().requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: kernels.route(logits, 2, **way)[0], (logits,))


def test_rows_beyond_32_bits():
    stride = 2**31 + 16
    far = torch.empty(stride + 24, dtype=torch.bfloat16, device=DEVICE).as_strided((2, 24), (stride, 1))
    near = logits_of(2, 24, torch.bfloat16)
    far.copy_(near)
    upstream = torch.randn(2, 4, device=DEVICE)
    with kernels.using("require"):
        actual, wanted = (gradients(lambda x: kernels.route(x, 4), [x], upstream) for x in (far, near))
    assert torch.equal(actual[0], wanted[0])
    assert torch.equal(actual[1][0], wanted[1][0])


@pytest.mark.slow
def test_the_operators_are_of_torch():
    logits = torch.randn(5, 12, device=DEVICE, requires_grad=True)
    bias = torch.zeros(12, device=DEVICE)
    opcheck(torch.ops.nearpeak.route.default, (logits, bias, 3, "sigmoid", True, 2.0))
    experts = kernels.route(logits.detach(), 3)[1]
    arguments = (torch.randn(5, 3, device=DEVICE), logits.detach(), experts, "softmax", False, 1.0)
    opcheck(torch.ops.nearpeak.route_backward.default, arguments)


def test_it_compiles_without_a_graph_break():
    def layer(logits):
        weights, experts = kernels.route(logits * 2, 3, renormalize=True)
        return (weights * experts).sum()

    logits = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(logits), logits)
    torch.testing.assert_close(actual, torch.autograd.grad(layer(logits), logits))


def test_what_it_does_not_take():
    logits = torch.randn(3, 4, device=DEVICE)
    assert "float64" in kernels.supports(kernels.route, logits.double(), 2).reason
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="4096"):
        kernels.route(torch.zeros(1, 5000, device=DEVICE), 2)
    with pytest.raises(UsageError, match="softmax"):
        kernels.route(logits, 2, scores="softmaks")
    with pytest.raises(UsageError, match="k is 5"):
        kernels.route(logits, 5)
    with pytest.raises(UsageError, match=r"\(4,\), and has \(3,\)"):
        kernels.route(logits, 2, bias=torch.zeros(3, device=DEVICE))
    with pytest.raises(UsageError, match=r"\(4,\)"):
        kernels.route(logits[0], 2)


def test_candidates_compute_the_same():
    logits, upstream = logits_of(7, 60), torch.randn(7, 4, device=DEVICE)
    weights, experts = kernels.route(logits, 4)
    by_logit = jit.route_backward(upstream, logits, experts, "softmax", False, 1.0)
    assert len(jit.route_candidates(128)) >= 10
    for config in jit.route_candidates(60):
        again = jit.route(logits, None, 4, "softmax", False, 1.0, config=config)
        assert torch.equal(again[1], experts)
        torch.testing.assert_close(again[0], weights)
        torch.testing.assert_close(
            jit.route_backward(upstream, logits, experts, "softmax", False, 1.0, config=config), by_logit
        )


@pytest.mark.gpu
def test_many_tokens_a_hundred_times_and_in_a_graph():
    logits = torch.randn(65536, 256, device=DEVICE)
    first = kernels.route(logits, 8, scores="sigmoid", renormalize=True)
    expected = kernels.route.reference(logits, 8, scores="sigmoid", renormalize=True)
    torch.testing.assert_close(first[0], expected[0])
    # where they name another expert, its score differs in the last bit or so, by how the exponential is rounded
    chosen, wanted = (logits.sigmoid().gather(1, found.long()) for _, found in (first, expected))
    other = first[1] != expected[1]
    assert ((chosen - wanted).abs() <= 1e-6 * other).all()
    assert other.float().mean() < 1e-3
    for _ in range(100):
        assert all(map(torch.equal, kernels.route(logits, 8, scores="sigmoid", renormalize=True), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = kernels.route(logits, 8, scores="sigmoid", renormalize=True)
    logits.normal_()
    graph.replay()
    assert all(map(torch.equal, recorded, kernels.route(logits, 8, scores="sigmoid", renormalize=True)))
