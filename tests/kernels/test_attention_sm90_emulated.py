"""Attention by the kernels for Hopper, run on a CPU: their logic and barriers, whichever warps are slow."""

from __future__ import annotations

import math

import pytest
import torch
from emulated_hopper import emulated
from kernel_checks import DEVICE

pytest.importorskip("triton.experimental.gluon")

from nearpeak.kernels.attention import fp8_triton, sm90, tuning
from nearpeak.kernels.attention.reference import attention_forward
from nearpeak.kernels.attention.triton import AttentionProblem

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tensors are on a GPU")

SEES = {"full": (-1, True), "causal": (0, True), "causal from the first": (0, False)}
"""How far to the right a query sees, and whether the last query is beside the last key."""


class Case:
    """Tensors, and results and gradients of attention in float64."""

    def __init__(
        self, heads, key_heads, queries, keys, dim, sees, batches=1, dtype=torch.bfloat16, value_dim=None, left=-1,
        sinks=None,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        value_dim = value_dim or dim

        def random_tensor(tokens, heads, dim):
            return torch.randn((batches, tokens, heads, dim), generator=generator).to(dtype).transpose(1, 2)

        query, key = random_tensor(queries, heads, dim), random_tensor(keys, key_heads, dim)
        value, self.gradient = random_tensor(keys, key_heads, value_dim), random_tensor(queries, heads, value_dim)
        right, bottom_right = SEES[sees]
        self.problem = AttentionProblem(
            query, key, value, None, None, sinks, *[None] * 3, 0, 0, left, right, bottom_right, scale=dim**-0.5,
            softcap=0.0, dropout=0.0,
        )  # fmt: skip
        wide = [one.double().requires_grad_() for one in (query, key, value)]
        group = heads // key_heads
        scores = wide[0] @ wide[1].repeat_interleave(group, 1).mT * dim**-0.5
        if right == 0:
            diagonal = keys - queries if bottom_right else 0
            every = torch.ones(queries, keys, dtype=torch.bool)
            hidden = every.triu(diagonal + 1)
            if left >= 0:
                hidden |= every.tril(diagonal - left - 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        values = wide[2]
        if sinks is not None:  # one more key, whose value is 0
            wide.append(sinks.double().requires_grad_())
            scores = torch.cat([scores, wide[3][None, :, None, None].expand(batches, heads, queries, 1)], -1)
            values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        result = scores.softmax(-1).nan_to_num() @ values.repeat_interleave(group, 1)
        self.gradients = torch.autograd.grad(result, wide, self.gradient.double())
        self.result, self.lse = result.detach(), scores.logsumexp(-1).detach()


def plain_statistics(problem, gradient, lse, lse_gradient, result, padded):
    """Logarithms and means as the kernels for them have them, which are slow here, and have tests of their own."""
    rest = (0, padded - problem.queries)
    logarithms = torch.where(lse == float("-inf"), float("inf"), lse / math.log(2.0))
    means = (gradient.float() * result.float()).sum(-1)
    return (
        torch.nn.functional.pad(logarithms, rest, value=float("inf")).contiguous(),
        torch.nn.functional.pad(means, rest).contiguous(),
    )


@pytest.fixture
def emulate(monkeypatch):
    """Runs one of the passes by so many processors."""

    def run(call, processors, seed=0, slowest=None):
        monkeypatch.setattr(sm90, "statistics", plain_statistics)
        with emulated((sm90,), monkeypatch, at_a_time=processors, seed=seed, slowest=slowest) as launch:
            monkeypatch.setattr(sm90, "processors", lambda device: processors)
            monkeypatch.setattr(sm90, "launch", launch)
            torch.use_deterministic_algorithms(True)  # new tensors have no numbers
            try:
                return call()
            finally:
                torch.use_deterministic_algorithms(False)

    return run


def check_forward(emulate, case, processors, seed=0, slowest=None):
    result, lse = emulate(lambda: sm90.forward(case.problem), processors, seed, slowest)
    torch.testing.assert_close(result.double(), case.result, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.double(), case.lse, rtol=1e-5, atol=1e-5)


def check_backward(emulate, case, processors, seed=0, slowest=None):
    lse, result = case.lse.float(), case.result.to(case.gradient.dtype)

    def call():
        return sm90.backward(case.problem, case.gradient, None, result, lse, True, True, False, True)

    actual = [one for one in emulate(call, processors, seed, slowest) if one.numel()]
    for one, right in zip(actual, case.gradients, strict=True):
        assert (one.double() - right).abs().max() < 0.01 * right.abs().max() + 1e-5
    return actual


CONFIGS = [
    (dim, causal, config)
    for dim in (64, 128)
    for causal in (False, True)
    for config in tuning.sm90_candidates(dim, causal)
]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "causal", "config"), CONFIGS, ids=str)
def test_each_configuration(emulate, monkeypatch, dim, causal, config):
    monkeypatch.setattr(sm90, "sm90_config", lambda *_: config)
    case = Case(2, 2, 210, 290, dim, "causal" if causal else "full")
    check_forward(emulate, case, 2, seed=dim + config.together)


@pytest.mark.slow
@pytest.mark.parametrize("sees", ["full", "causal"])
@pytest.mark.parametrize("dims", [(80, 80), (72, 72), (192, 128), (200, 248)], ids=str)
def test_heads_in_parts_and_heads_of_fewer_dimensions_than_their_tile(emulate, dims, sees):
    check_forward(emulate, Case(2, 1, 200, 270, dims[0], sees, value_dim=dims[1]), 2)


TILES = [
    (dim, value_dim, tiles)
    for dim, value_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
    for tiles in tuning.sm90_tile_candidates(dim, value_dim)
]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "value_dim", "tiles"), TILES, ids=str)
def test_each_size_of_tiles(emulate, monkeypatch, dim, value_dim, tiles):
    """Causal, with a diagonal at which consumers see another number of blocks."""
    monkeypatch.setattr(sm90, "sm90_tiles", lambda *_: tiles)
    config = tuning.Sm90Config(consumers=3 if dim == 64 else 2, persistent=True, together=1)
    monkeypatch.setattr(sm90, "sm90_config", lambda *_: config)
    check_forward(emulate, Case(2, 1, 300, 330, dim, "causal", value_dim=value_dim), 2, slowest=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "sinks"), [(0, None), (5, [0.5, -1.0]), (130, None), (1000, [0.0, 9.0])], ids=lambda given: str(given)
)
@pytest.mark.parametrize("sizes", [(700, 700), (300, 650), (500, 200)], ids=str)
@pytest.mark.parametrize(("dim", "consumers"), [(64, 3), (128, 2)])
def test_windows_and_sinks(emulate, monkeypatch, dim, consumers, sizes, left, sinks):
    """Also of queries that see no key, and of blocks that only one of the consumers sees."""
    config = tuning.Sm90Config(consumers=consumers, persistent=True, together=1)
    monkeypatch.setattr(sm90, "sm90_config", lambda *_: config)
    sees = "causal" if sizes[0] < sizes[1] else "causal from the first"
    case = Case(2, 1, *sizes, dim, sees, left=left, sinks=None if sinks is None else torch.tensor(sinks))
    assert sm90.supports(case.problem)
    check_forward(emulate, case, 2, seed=left, slowest=left % 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "left", "sinks"), [((400, 400), 0, None), ((200, 450), 5, [0.5, -1.0]), ((400, 200), 130, [0.0, 9.0])]
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (192, 128)], ids=str)
def test_gradients_of_windows_and_sinks(emulate, monkeypatch, dims, sizes, left, sinks):
    """Also of queries that see no key, of keys that no query sees, and with more programs than processors."""
    monkeypatch.setattr(sm90, "query_gradient_sums", lambda *_: 1 + left % 2)
    sees = "causal" if sizes[0] < sizes[1] else "causal from the first"
    given = None if sinks is None else torch.tensor(sinks)
    case = Case(2, 1, *sizes, dims[0], sees, value_dim=dims[1], left=left, sinks=given)
    assert sm90.supports_backward(case.problem)
    check_backward(emulate, case, 2 if left == 130 else 100, seed=left, slowest=left % 4)


def in_order_of_weights(values):
    """Keys [..., padded] as they follow each other in transposed values of 8 bits, in their own order."""
    return values.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)


@pytest.mark.parametrize("tokens", [128, 300])
def test_operands_in_8_bits(tokens):
    case = Case(4, 2, tokens, tokens, 64, "full", batches=2)
    problem = case.problem
    found = fp8_triton.quantized(problem.query, problem.key, problem.value)
    values = in_order_of_weights(found.value.float()).mT
    assert not values[:, :, tokens:].any()
    for x, actual, scales in (
        (problem.query, found.query.float(), found.query_scales), (problem.key, found.key.float(), found.key_scales),
        (problem.value, values[:, :, :tokens], found.value_scales),
    ):  # fmt: skip
        expected = x.float().abs().amax((2, 3)) / 448.0
        torch.testing.assert_close(scales, expected)
        exact = x.float() / expected[:, :, None, None]
        assert (actual - exact).abs().max() <= 16.0  # half of the step at 256 and more
        small = exact.abs() < 1.0
        assert (actual - exact)[small].abs().max() <= 1.0 / 32


@pytest.mark.slow
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("size", [(2, 2, 300, 300, 64), (2, 1, 200, 270, 128)], ids=str)
def test_results_of_operands_in_8_bits(emulate, monkeypatch, size, sees):
    """Against the same numbers in float64: weights are rounded to 4 bits, and errors of many keys cancel."""
    case = Case(*size, sees)
    problem = case.problem
    assert sm90.supports_fp8(problem)
    inputs = fp8_triton.quantized(problem.query, problem.key, problem.value)
    keys = in_order_of_weights(inputs.value.float()).mT[:, :, : problem.keys]
    wide = (inputs.query, inputs.key, keys)
    scales = (inputs.query_scales, inputs.key_scales, inputs.value_scales)
    query, key, value = (x.double() * scale[:, :, None, None] for x, scale in zip(wide, scales, strict=True))
    arguments = (query, key, value, *[None] * 6, 0, 0, -1, problem.right, problem.bottom_right, problem.scale, 0.0, 0.0)
    expected, expected_lse = attention_forward(*arguments)
    result, lse = emulate(lambda: sm90.forward(problem, inputs), 2)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)
    assert (result.double() - expected).norm() < 0.03 * expected.norm()
    assert (expected - case.result).norm() < 0.06 * case.result.norm()


SIZES = [
    # heads, key heads, queries, keys, dim
    (1, 1, 256, 200, 64),
    (2, 1, 200, 70, 128),  # causal: some queries see nothing, and a pair of blocks nobody
    (3, 1, 200, 270, 64),
    (2, 2, 1, 7, 128),
]


@pytest.mark.slow
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results(emulate, size, sees):
    check_forward(emulate, Case(*size, sees), 2)


@pytest.mark.parametrize("slowest", range(3))
@pytest.mark.parametrize("dim", [64, 128])
def test_results_where_one_is_slow(emulate, monkeypatch, dim, slowest):
    config = tuning.Sm90Config(consumers=2, persistent=True, together=1)
    monkeypatch.setattr(sm90, "sm90_config", lambda *_: config)
    check_forward(emulate, Case(2, 1, 300, 300, dim, "causal"), 2, slowest, slowest)


@pytest.mark.slow
@pytest.mark.parametrize(("sums", "processors"), [(1, 100), (2, 1)])
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients(emulate, monkeypatch, size, sees, sums, processors):
    """Also where a head has more blocks of keys than there are processors."""
    monkeypatch.setattr(sm90, "query_gradient_sums", lambda *_: sums)
    check_backward(emulate, Case(*size, sees), processors, seed=processors)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "sees"), [(64, "causal"), (128, "full")])
def test_gradients_are_the_same_whichever_is_slow(emulate, monkeypatch, dim, sees):
    """One of the warpgroups, the warp that loads, or the one that adds."""
    monkeypatch.setattr(sm90, "query_gradient_sums", lambda *_: 2)
    case = Case(1, 1, 300, 300, dim, sees)
    first = check_backward(emulate, case, 4)
    for slowest in range(4):
        assert all(map(torch.equal, first, check_backward(emulate, case, 4, slowest, slowest)))


@pytest.mark.slow
def test_heads_that_go_down_after_those_that_go_up(emulate):
    """Causal, with programs of one head on all processors: every other one begins with the last queries."""
    case = Case(1, 1, 300, 300, 64, "causal", batches=3, dtype=torch.float16)
    check_backward(emulate, case, 4, seed=1)
    check_forward(emulate, case, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("sees", "processors"), [("full", 2), ("causal", 100), ("causal from the first", 2)])
def test_gradients_where_the_programs_of_heads_alternate(emulate, monkeypatch, sees, processors):
    monkeypatch.setattr(sm90, "heads_together", lambda *_: 2)
    check_backward(emulate, Case(4, 2, 200, 270, 64, sees, batches=2), processors, seed=processors)


WIDE = [(96, 96), (72, 72), (192, 128), (160, 104)]
"""Dimensions of keys and values whose tiles have parts, or columns that the head does not have."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sees", "sums", "processors"), [("full", 2, 100), ("causal", 2, 1), ("causal from the first", 1, 100)]
)
@pytest.mark.parametrize("dims", WIDE, ids=str)
def test_gradients_of_heads_in_parts(emulate, monkeypatch, dims, sees, sums, processors):
    monkeypatch.setattr(sm90, "query_gradient_sums", lambda *_: sums)
    case = Case(3, 1, 200, 270 if processors > 1 else 70, dims[0], sees, value_dim=dims[1])
    assert sm90.supports_backward(case.problem)
    check_backward(emulate, case, processors, seed=processors)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(96, 96), (192, 128)], ids=str)
def test_gradients_of_heads_in_parts_are_the_same_whichever_is_slow(emulate, dims):
    case = Case(2, 2, 300, 300, dims[0], "causal", value_dim=dims[1])
    first = check_backward(emulate, case, 4)
    for slowest in range(4):
        assert all(map(torch.equal, first, check_backward(emulate, case, 4, slowest, slowest)))
