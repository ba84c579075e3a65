"""`moe`: against a loop over experts, and its operators against plain torch."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, gradients, layouts
from torch.library import opcheck
from torch.nn.functional import gelu, linear, silu
from torch.utils.checkpoint import checkpoint

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")

from nearpeak.kernels.gemm.grouped import group_rows, multiply_gathered, tile_height
from nearpeak.kernels.moe import gate_backward, gathered_weight_gradient, moe_layer
from nearpeak.kernels.moe import triton as moe_triton

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without products in bfloat16


def plain(x, weights, gate_up, down, experts, activation=silu):
    """Token by token, as one would write it down."""
    result = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for token, numbers in enumerate(experts.tolist()):
        for choice, number in enumerate(numbers):
            if 0 <= number < len(down):
                gate, up = linear(x[token], gate_up[number]).chunk(2)
                row = linear(activation(gate) * up, down[number])
                result = result.index_add(
                    0, torch.tensor([token], device=x.device), (row * weights[token, choice])[None].to(result.dtype)
                )
    return result.to(x.dtype)


def made(tokens=7, columns=24, inner=16, number=5, k=2, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(tokens, columns, device=DEVICE).to(dtype)
    gate_up = (torch.randn(number, 2 * inner, columns, device=DEVICE) / columns**0.5).to(dtype)
    down = (torch.randn(number, columns, inner, device=DEVICE) / inner**0.5).to(dtype)
    weights, experts = kernels.route(torch.randn(tokens, number, device=DEVICE), k)
    return x, weights.detach(), gate_up, down, experts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients(dtype):
    *inputs, experts = made(dtype=dtype)
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda x, weights, gate_up, down: kernels.moe(x, weights, experts, gate_up, down),
            lambda x, weights, gate_up, down: plain(x, weights, gate_up, down, experts),
            inputs,
            by_exp=True,
        )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations_and_dropped_choices(activation):
    *inputs, experts = made()
    experts[0] = -1
    experts[2, 1] = 99
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    with kernels.using("require"):
        actual = kernels.moe(inputs[0], inputs[1], experts, *inputs[2:], activation=activation)
    torch.testing.assert_close(actual, plain(*inputs, experts, lambda x: gelu(x, approximate=approximate)))
    assert not actual[0].any()


def test_all_tokens_to_one_expert_and_no_tokens():
    *inputs, experts = made(tokens=40)
    experts[:, 0] = 3
    experts[:, 1] = -1
    with kernels.using("require"):
        actual = kernels.moe(inputs[0], inputs[1], experts, *inputs[2:])
        none = kernels.moe(inputs[0][:0], inputs[1][:0], experts[:0], *inputs[2:])
    torch.testing.assert_close(actual, plain(*inputs, experts))
    assert none.shape == (0, 24)


def call_with(experts, activation="silu"):
    """The layer as a function of what has gradients."""

    def call(x, weights, gate_up, down):
        return kernels.moe(x, weights, experts, gate_up, down, activation=activation)

    return call


def with_dropped(tokens=9, **sizes):
    *inputs, experts = made(tokens=tokens, **sizes)
    experts[0] = -1
    experts[2, 1] = 99
    experts[5, 0] = -7
    return *inputs, experts, (experts >= 0) & (experts < len(inputs[2]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_with_dropped_choices(dtype):
    *inputs, experts, taken = with_dropped(dtype=dtype)
    upstream = torch.randn(inputs[0].shape, device=DEVICE).to(dtype)
    with kernels.using("require"):
        assert_kernel_is_exact(call_with(experts), lambda *given: plain(*given, experts), inputs, upstream, by_exp=True)
        _, (by_x, by_weights, *_) = gradients(call_with(experts), inputs, upstream)
    assert not by_weights[~taken].any()
    assert by_weights[taken].all()
    assert not by_x[0].any()


@pytest.mark.parametrize("mode", ["require", "off"])
def test_experts_without_tokens_have_gradients_of_zeros(mode):
    *inputs, experts, _ = with_dropped()
    experts[experts == 3] = 1
    with kernels.using(mode):
        _, (*_, by_gate_up, by_down) = gradients(call_with(experts), inputs, torch.ones_like(inputs[0]))
    for one in (by_gate_up, by_down):
        assert not one[3].any()
        assert one[1].any()


def test_what_is_dropped_does_not_matter():
    *inputs, experts, taken = with_dropped()
    upstream = torch.randn(inputs[0].shape, device=DEVICE)
    with kernels.using("require"):
        expected = gradients(call_with(experts), inputs, upstream)
        inputs[0][0] = upstream[0] = float("nan")  # of a token without experts
        inputs[1][~taken] = float("inf")
        actual = gradients(call_with(experts), inputs, upstream)
    assert torch.equal(actual[0], expected[0])
    assert all(map(torch.equal, actual[1], expected[1]))


NAMES = ("x", "weights", "gate_up", "down")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["require", "off"])
@pytest.mark.parametrize("wanted", [("x",), ("weights",), ("gate_up",), ("down",), ("x", "down")], ids=str)
def test_gradients_of_some(wanted, mode):
    *inputs, experts, _ = with_dropped()
    upstream = torch.randn(inputs[0].shape, device=DEVICE)
    with kernels.using(mode):
        result, expected = gradients(call_with(experts), inputs, upstream)
        given = [one.detach().requires_grad_(name in wanted) for name, one in zip(NAMES, inputs, strict=True)]
        actual = call_with(experts)(*given)
        actual.backward(upstream)
    assert torch.equal(actual, result)
    for name, one, right in zip(NAMES, given, expected, strict=True):
        assert (one.grad is not None) == (name in wanted)
        assert one.grad is None or torch.equal(one.grad, right)


def test_without_gradients_the_same():
    *inputs, experts, _ = with_dropped()
    leaves = [one.detach().requires_grad_() for one in inputs]
    with kernels.using("require"):
        result = call_with(experts)(*leaves)
        with torch.no_grad():
            assert torch.equal(call_with(experts)(*leaves), result)
        assert torch.equal(call_with(experts)(*inputs), result)
    assert not call_with(experts)(*inputs).requires_grad


@pytest.mark.slow
def test_again_and_again_the_same():
    *inputs, experts, _ = with_dropped(dtype=torch.bfloat16)
    upstream = torch.randn(inputs[0].shape, device=DEVICE)
    with kernels.using("require"):
        first, given = gradients(call_with(experts), inputs, upstream)
        for _ in range(2):
            again, found = gradients(call_with(experts), inputs, upstream)
            assert torch.equal(again, first)
            assert all(map(torch.equal, found, given))


@pytest.mark.slow
@pytest.mark.parametrize("layout", range(1, 5))
def test_any_layout(layout):
    *inputs, experts, _ = with_dropped()
    upstream = torch.randn(inputs[0].shape, device=DEVICE)
    ways = [list(layouts(one))[layout][1] for one in (*inputs, upstream)]
    with kernels.using("require"):
        actual = gradients(call_with(experts.t().contiguous().t()), ways[:4], ways[4])
        expected = gradients(call_with(experts), inputs, upstream)
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 24), (1, 1)])
def test_gradients_that_are_expanded(shape):
    *inputs, experts, _ = with_dropped()
    upstream = torch.randn(shape, device=DEVICE).expand(9, 24)
    with kernels.using("require"):
        found = gradients(call_with(experts), inputs, upstream)[1]
        wanted = gradients(call_with(experts), inputs, upstream.contiguous())[1]
    assert all(map(torch.equal, found, wanted))


def test_nothing_has_gradients_too():
    *inputs, experts = made()
    for tokens, k in ((0, 2), (7, 0)):
        given = [inputs[0][:tokens], inputs[1][:tokens, :k], *inputs[2:]]
        with kernels.using("require"):
            result, found = gradients(call_with(experts[:tokens, :k]), given, torch.ones(tokens, 24, device=DEVICE))
        assert result.shape == (tokens, 24)
        assert not result.any()
        for one, right in zip(found, given, strict=True):
            assert one.shape == right.shape
            assert not one.any()


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_derivatives_of_the_reference(activation):
    *inputs, experts, _ = with_dropped(tokens=6, columns=3, inner=2)
    leaves = [one.double().requires_grad_() for one in inputs]
    with kernels.using("off"):
        assert torch.autograd.gradcheck(call_with(experts, activation), leaves)
        assert torch.autograd.gradgradcheck(call_with(experts, activation), leaves)


def test_there_is_no_second_derivative():
    *inputs, experts, _ = with_dropped()
    leaves = [one.detach().requires_grad_() for one in inputs]
    with kernels.using("require"), pytest.raises(RuntimeError, match=r"no second derivative.*using\('off'\)"):
        torch.autograd.grad(call_with(experts)(*leaves).sum(), leaves, create_graph=True)


@pytest.mark.slow
def test_checkpoints():
    *inputs, experts, _ = with_dropped()
    upstream = torch.randn(inputs[0].shape, device=DEVICE)
    with kernels.using("require"):
        expected = gradients(call_with(experts), inputs, upstream)
        actual = gradients(lambda *given: checkpoint(call_with(experts), *given, use_reentrant=False), inputs, upstream)
    assert torch.equal(actual[0], expected[0])
    assert all(map(torch.equal, actual[1], expected[1]))


def test_matrices_that_do_not_fit():
    x, weights, gate_up, down, experts = made()
    with pytest.raises(UsageError, match=r"\(5, 32, 24\) and \(5, 24, 15\)"):
        kernels.moe(x, weights, experts, gate_up, down[..., :15])
    with pytest.raises(UsageError, match=r"2 \* inner.*\(5, 31, 24\)"):
        kernels.moe(x, weights, experts, gate_up[:, :31], down[..., :15])
    with pytest.raises(UsageError, match=r"\(32, 24\) and \(24, 16\)"):
        kernels.moe(x, weights, experts, gate_up[0], down[0])


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_calls_that_make_no_sense(mode):
    x, weights, gate_up, down, experts = made()
    with kernels.using(mode):
        with pytest.raises(UsageError, match=r"\(tokens, 24\).*\(7, 23\)"):
            kernels.moe(x[:, :23], weights, experts, gate_up, down)
        with pytest.raises(UsageError, match=r"\(1, 7, 24\)"):
            kernels.moe(x[None], weights, experts, gate_up, down)
        with pytest.raises(UsageError, match=r"experts have the shape \(7, 2\), and weights \(7, 1\)"):
            kernels.moe(x, weights[:, :1], experts, gate_up, down)
        with pytest.raises(UsageError, match=r"\(6, 24\) and \(7, 2\)"):
            kernels.moe(x[:6], weights, experts, gate_up, down)
        with pytest.raises(UsageError, match="int32 or int64"):
            kernels.moe(x, weights, experts.float(), gate_up, down)
        with pytest.raises(UsageError, match=r"silo.*silu"):
            kernels.moe(x, weights, experts, gate_up, down, activation="silo")


def test_what_no_kernel_takes():
    x, weights, gate_up, down, experts = made()
    with kernels.using("require"):
        with pytest.raises(KernelUnavailable, match="float64"):
            kernels.moe(x.double(), weights, experts, gate_up.double(), down.double())
        for given in ((gate_up.bfloat16(), down), (gate_up, down.bfloat16())):
            with pytest.raises(KernelUnavailable, match="one dtype"):
                kernels.moe(x, weights, experts, *given)


@pytest.mark.parametrize("mode", ["require", "off"])
def test_autocast_is_a_cast_of_all_but_weights(mode):
    *inputs, experts, _ = with_dropped()
    upstream = torch.randn(inputs[0].shape, device=DEVICE)
    low = [one if name == "weights" else one.bfloat16() for name, one in zip(NAMES, inputs, strict=True)]
    with kernels.using(mode):
        expected, wanted = gradients(call_with(experts), low, upstream)
        with torch.autocast(DEVICE, torch.bfloat16):
            actual, found = gradients(call_with(experts), inputs, upstream)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)
    for one, right in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, right.float())


def sorted_for(experts, number):
    """The groups of rows, the row of each choice, the token of each row, and the height of tiles."""
    counts, row_map, sources = kernels.sort_tokens(experts, number_of_experts=number)
    height = tile_height(len(sources), number)
    return group_rows(counts, len(sources), height), row_map, sources, height


@pytest.mark.slow
def test_the_operators_are_of_torch():
    *inputs, experts, _ = with_dropped()
    x, weights, gate_up, down = inputs
    groups, row_map, sources, height = sorted_for(experts, 5)
    rows = len(sources)
    leaves = [one.clone().requires_grad_() for one in inputs]
    named = torch.ops.nearpeak
    opcheck(named.moe.default, (*leaves, groups, row_map, sources, height, "silu", True))
    opcheck(named.moe.default, (*inputs, groups, row_map, sources, height, "silu", False))
    opcheck(named.gathered_gemm.default, (x, gate_up, groups, height, False, "silu", sources))
    opcheck(named.gathered_gemm.default, (x, down, groups, height, True, "", sources))
    inner, upstream = torch.randn(rows, 16, device=DEVICE), torch.randn(rows, 32, device=DEVICE)
    opcheck(named.gathered_weight_gradient.default, (upstream, x, groups, 5, sources, "rows"))
    opcheck(named.gathered_weight_gradient.default, (x, inner, groups, 5, sources, "gradient"))
    # what is dropped is left as it is found, and so may be another each time
    experts = made(tokens=9)[-1]
    row_map = sorted_for(experts, 5)[1]
    opcheck(named.moe_gate_backward.default, (inner, upstream, weights, row_map, "gelu"))


def test_operators_give_what_plain_torch_gives():
    *inputs, experts, _ = with_dropped()
    x, _, gate_up, down = inputs
    groups, row_map, sources, height = sorted_for(experts, 5)
    given = (*inputs, groups, row_map, sources, height, "gelu", True)
    taken = sorted_rows(row_map)
    torch.testing.assert_close(moe_layer(*given)[0], moe_layer._reference(*given)[0])
    torch.testing.assert_close(moe_layer(*given)[1][taken], moe_layer._reference(*given)[1][taken])
    rows = torch.randn(len(sources), 32, device=DEVICE)
    for operator, given in (
        (multiply_gathered, (x, gate_up, groups, height, False, "gelu", sources)),
        (multiply_gathered, (x, down, groups, height, True, "", sources)),
        (gathered_weight_gradient, (rows, x, groups, 5, sources, "rows")),
        (gathered_weight_gradient, (x, rows, groups, 5, sources, "gradient")),
    ):
        torch.testing.assert_close(operator(*given), operator._reference(*given))


def sorted_rows(row_map):
    """The rows of choices that are not dropped."""
    return row_map[row_map >= 0].long().sort().values


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 40, 700])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_backward_of_the_gate(activation, columns, dtype):
    torch.manual_seed(0)
    experts = torch.tensor([[1, 0], [-1, 1], [2, 2]], device=DEVICE)
    _, row_map, _, _ = sorted_for(experts, 3)
    upstream, kept = (torch.randn(6, n, device=DEVICE).to(dtype) for n in (columns, 2 * columns))
    weights = torch.rand(3, 2, device=DEVICE)
    taken = sorted_rows(row_map)
    wide = gate_backward._reference(upstream.double(), kept.double(), weights.double(), row_map, activation)
    low = gate_backward._reference(upstream, kept, weights, row_map, activation)
    for config in (None, moe_triton.TokenConfig(columns=16, warps=1)):
        found = moe_triton.gate_backward(upstream, kept, weights, row_map, activation, config=config)
        for one, exact, same in zip(found[:2], wide[:2], low[:2], strict=True):
            assert_as_exact(one[taken], exact[taken], same[taken], by_exp=True)
        assert_as_exact(found[2], wide[2], low[2], by_exp=True)
        assert found[2][1, 0] == 0


@pytest.mark.slow
def test_the_layer_compiles_without_a_graph_break():
    *inputs, experts, _ = with_dropped()
    leaves = [one.detach().requires_grad_() for one in inputs]

    def loss(*given):
        return call_with(experts)(given[0] * 2, *given[1:]).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(loss(*leaves), leaves))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), loss(*inputs))
    some = [leaves[0].detach(), leaves[1], leaves[2].detach(), leaves[3]]
    actual = torch.autograd.grad(compiled(*some), some[1::2])
    torch.testing.assert_close(actual, torch.autograd.grad(loss(*some), some[1::2]))
