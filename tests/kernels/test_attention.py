"""Attention: results, logarithms and all gradients against float64, for every option and combinations of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, TIMES, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError
from nearpeak.kernels.attention.reference import attention_forward

pytest.importorskip("triton")

from nearpeak.kernels.attention import triton as attention_triton
from nearpeak.kernels.attention import tuning as attention_tuning
from nearpeak.kernels.attention.triton import AttentionProblem, addressable
from nearpeak.kernels.attention.tuning import TileConfig

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without products in bfloat16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = 1e-6
"""What sums of float32 are off by for each query where the exact gradient is 0, as of a query that sees one key: a few
units of float32 at the size of products of normal numbers."""


@pytest.fixture(autouse=True)
def seeded_and_required():
    torch.manual_seed(0)
    with kernels.using("require"):
        yield


def randn(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def random_inputs(batch=1, heads=2, key_heads=None, queries=19, keys=None, dim=16, value_dim=None, dtype=FP32):
    keys, key_heads = queries if keys is None else keys, key_heads or heads
    return (
        randn(batch, heads, queries, dim, dtype=dtype),
        randn(batch, key_heads, keys, dim, dtype=dtype),
        randn(batch, key_heads, keys, value_dim or dim, dtype=dtype),
    )


def passes(function, tensors, options, upstream=None):
    """The result, the logarithms and the gradients of all tensors that have one, also among the options."""
    leaves = [one.detach().requires_grad_() for one in tensors]
    named = {
        name: one.detach().requires_grad_(name in ("bias", "sinks") and one.is_floating_point())
        if isinstance(one, torch.Tensor)
        else one
        for name, one in options.items()
    }
    leaves += [one for one in named.values() if isinstance(one, torch.Tensor) and one.requires_grad]
    result, lse = function(*leaves[:3], return_lse=True, **named)
    if upstream is None:
        generator = torch.Generator(device=result.device).manual_seed(1)
        upstream = [torch.randn(one.shape, generator=generator, device=one.device) for one in (result, lse)]
    upstream = [above.to(one.dtype) for above, one in zip(upstream, (result, lse), strict=True)]
    actual = torch.autograd.grad((result, lse), leaves, upstream)
    return [result.detach(), lse.detach(), *actual], upstream


def assert_exact(tensors, options, function=kernels.attention):
    """The rule of `kernel_checks`, with a unit in the last place that is of what is summed up, not of the sum.

    Weights, and gradients of scores, are rounded to 16 bits before the second product, as everyone's are. Where a sum
    of such is near 0, torch may happen to be exact.
    """
    actual, upstream = passes(function, tensors, options)

    def wide(one):
        return one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    reference = function.reference
    exact, _ = passes(reference, [wide(one) for one in tensors], {k: wide(one) for k, one in options.items()}, upstream)
    low, _ = passes(reference, tensors, options, upstream)
    value, above = (one.abs().max().item() if one.numel() else 0.0 for one in (tensors[2], upstream[0]))
    rows = max(tensors[0][..., 0].numel(), 1)
    # of the result, the logarithms, three gradients, and those that are summed over all queries at most
    summed = [value, 0.0, *[above * max(value, 1.0)] * 3, *[above * value * rows**0.5] * 2]
    unit = torch.finfo(tensors[0].dtype).eps
    for place, (one, right, torchs) in enumerate(zip(actual, exact, low, strict=True)):
        assert one.shape == right.shape
        assert one.dtype == torchs.dtype
        assert torch.equal(one.isfinite(), right.isfinite()), place
        if not one.numel():
            continue
        hidden = ~right.isfinite()
        error, allowed = ((x.double() - right).masked_fill(hidden, 0.0).abs().max().item() for x in (one, torchs))
        size = right.masked_fill(hidden, 0.0).abs().max().item()
        limit = TIMES * allowed + 1.5 * (torch.finfo(one.dtype).eps * size + unit * summed[place]) + SMALL * rows
        assert error <= limit, f"{place}: off by {error:.3g}, torch by {allowed:.3g}, size {size:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims, dtype",
    [
        *[(dims, BF16) for dims in ((32, 32), (64, 64), (128, 128), (256, 256), (96, 40), (7, 130), (1, 1))],
        *[(dims, dtype) for dims in ((64, 64), (192, 80)) for dtype in (FP32, FP16)],
    ],
    ids=str,
)
def test_dims_and_dtypes(dims, dtype):
    dim, value_dim = dims
    assert_exact(
        random_inputs(heads=1, queries=20, keys=37, dim=dim, value_dim=value_dim, dtype=dtype), {"causal": True}
    )


@pytest.mark.slow
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 70), (70, 1), (65, 64), (33, 150), (0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("alignment", ["bottom right", "top left"])
def test_lengths_in_both_alignments(queries, keys, alignment):
    assert_exact(
        random_inputs(heads=1, queries=queries, keys=keys, dtype=FP16), {"causal": True, "alignment": alignment}
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [(0, 0), (5, 3), (None, 4), (40, None), (1000, 1000), (None, None)], ids=str)
@pytest.mark.parametrize("alignment", ["bottom right", "top left"])
def test_windows(window, alignment):
    assert_exact(random_inputs(heads=1, queries=140, keys=90, dtype=FP16), {"window": window, "alignment": alignment})


@pytest.mark.parametrize("queries", [30, 100])
def test_a_window_with_causality(queries):
    assert_exact(random_inputs(heads=1, queries=queries, keys=100, dtype=BF16), {"window": (20, 20), "causal": True})


@pytest.mark.slow
@pytest.mark.parametrize("heads, key_heads", [(2, 1), (4, 2), (8, 1)])
def test_heads_that_share_keys(heads, key_heads):
    assert_exact(random_inputs(heads=heads, key_heads=key_heads, queries=18, keys=15, dtype=BF16), {"causal": True})


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.5])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
def test_scale_and_softcap(scale, softcap):
    assert_exact(random_inputs(heads=1, queries=20, keys=21), {"scale": scale, "softcap": softcap})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (17,), (9, 17), (2, 1, 1, 17), (4, 9, 1), (2, 1, 9, 17), (2, 4, 9, 17)], ids=str)
def test_a_bias_and_its_gradient(shape):
    tensors = random_inputs(batch=2, heads=4, key_heads=2, queries=9, keys=17, dtype=FP16)
    assert_exact(tensors, {"bias": randn(*shape), "softcap": 3.0})


def test_a_bias_in_several_blocks():
    tensors = random_inputs(heads=1, queries=70, keys=40, dtype=FP16)
    assert_exact(tensors, {"bias": randn(70, 1), "causal": True, "dropout": 0.2, "seed": 1})
    assert_exact(tensors, {"bias": randn(70, 40), "window": (9, 9), "slopes": torch.rand(1, device=DEVICE)})


def test_a_bias_of_minus_infinity_hides():
    tensors = random_inputs(heads=1, queries=6, keys=8)
    hidden = torch.rand(6, 8, device=DEVICE) < 0.5
    hidden[2] = True
    by_bias = kernels.attention(*tensors, bias=torch.zeros(6, 8, device=DEVICE).masked_fill(hidden, float("-inf")))
    assert torch.equal(by_bias, kernels.attention(*tensors, bias=~hidden))
    assert not by_bias[0, 0, 2].any()
    assert_exact(tensors, {"bias": ~hidden})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_slopes(shape):
    slopes = torch.rand(shape, device=DEVICE)
    assert_exact(random_inputs(batch=2, heads=4, key_heads=2, queries=9, keys=17), {"slopes": slopes, "causal": True})


def test_slopes_with_a_gradient_run_in_plain_torch():
    slopes = torch.rand(2, device=DEVICE, requires_grad=True)
    assert "slopes" in kernels.supports(kernels.attention, *random_inputs(), slopes=slopes).reason
    with kernels.using("auto"):
        assert torch.autograd.grad(kernels.attention(*random_inputs(), slopes=slopes).sum(), slopes)[0].any()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sinks(dtype):
    sinks = torch.tensor([0.5, float("-inf"), -30.0, 30.0], device=DEVICE)
    assert_exact(random_inputs(heads=4, queries=20, keys=9, dtype=dtype), {"sinks": sinks, "causal": True})


def test_queries_that_see_nothing():
    query, key, value = (one.requires_grad_() for one in random_inputs(heads=1, queries=5, keys=3))
    result, lse = kernels.attention(query, key, value, causal=True, return_lse=True)
    assert not result[:, :, :2].any()
    assert (lse[:, :, :2] == float("-inf")).all()
    gradient, *_ = torch.autograd.grad((result.sum() + lse[:, :, 2:].sum()), (query, key, value))
    assert not gradient[:, :, :2].any()
    assert gradient.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_dropout(dtype):
    options = {"dropout": 0.3, "seed": 1234567890123456789, "causal": True}
    assert_exact(random_inputs(batch=2, heads=2, key_heads=1, queries=10, keys=35, dtype=dtype), options)


def test_all_is_dropped():
    assert_exact(random_inputs(heads=1), {"dropout": 1.0, "seed": -1})


def test_a_seed_decides_on_what_is_dropped():
    tensors = random_inputs(heads=1, queries=20, keys=40)
    first = kernels.attention(*tensors, dropout=0.5, seed=3)
    assert torch.equal(first, kernels.attention(*tensors, dropout=0.5, seed=torch.tensor(3, device=DEVICE)))
    assert not torch.equal(first, kernels.attention(*tensors, dropout=0.5, seed=4))
    torch.manual_seed(7)
    drawn, other = (kernels.attention(*tensors, dropout=0.5) for _ in range(2))
    assert not torch.equal(drawn, other)
    torch.manual_seed(7)
    assert torch.equal(drawn, kernels.attention(*tensors, dropout=0.5))


def test_what_is_dropped_does_not_depend_on_blocks_or_share_between_heads():
    """With values of ones and zero scores, a row's result is the share of weights that were kept."""
    query = torch.zeros(2, 2, 40, 16, device=DEVICE)
    value = torch.eye(40, device=DEVICE).expand(2, 2, 40, 40)
    args = (
        query,
        query,
        value,
        None,
        None,
        None,
        torch.tensor(5, device=DEVICE),
        None,
        None,
        0,
        0,
        -1,
        -1,
        True,
        1.0,
        0.0,
    )
    masks = [
        attention_triton.forward(
            AttentionProblem(*args, 0.4), config=TileConfig(queries=queries, keys=keys, warps=4, stages=1)
        )[0]
        != 0
        for queries, keys in ((16, 64), (64, 16))
    ]
    assert torch.equal(*masks)
    assert abs(masks[0].float().mean().item() - 0.6) < 0.02
    flat = masks[0].reshape(4, -1)
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(flat, 2))


def packed(lengths, key_lengths, heads=2, key_heads=1, dim=16, dtype=FP32, after=0):
    starts = [
        torch.tensor([0, *itertools.accumulate(one)], dtype=torch.int32, device=DEVICE)
        for one in (lengths, key_lengths)
    ]
    tensors = (
        randn(sum(lengths) + after, heads, dim, dtype=dtype),
        randn(sum(key_lengths) + after, key_heads, dim, dtype=dtype),
        randn(sum(key_lengths) + after, key_heads, dim, dtype=dtype),
    )
    return tensors, {
        "query_starts": starts[0],
        "key_starts": starts[1],
        "longest_query": max(lengths, default=0),
        "longest_key": max(key_lengths, default=0),
    }


def assert_packed_exact(tensors, places, options):
    def call(*args, **kwargs):
        return kernels.attention_packed(*args, **places, **kwargs)

    call.reference = lambda *args, **kwargs: kernels.attention_packed.reference(*args, **places, **kwargs)
    assert_exact(tensors, options, call)


@pytest.mark.slow
@pytest.mark.parametrize("alignment", ["bottom right", "top left"])
def test_packed_sequences(alignment):
    tensors, places = packed([7, 0, 40, 1, 5], [9, 3, 33, 0, 5], after=4)
    assert_packed_exact(tensors, places, {"causal": True, "alignment": alignment, "sinks": randn(2)})


@pytest.mark.parametrize("options", [{"window": (4, 2)}, {"dropout": 0.3, "seed": 2}, {"softcap": 2.0}], ids=str)
def test_packed_sequences_with_options(options):
    tensors, places = packed([7, 20], [9, 18], dtype=BF16)
    assert_packed_exact(tensors, places, {**options, "slopes": torch.rand(2, device=DEVICE)})


def test_packed_sequences_are_those_one_by_one():
    tensors, places = packed([5, 0, 18], [5, 2, 18])
    result, lse = kernels.attention_packed(*tensors, **places, causal=True, return_lse=True)
    assert result.is_contiguous()
    for begin, end, key_begin, key_end in ((0, 5, 0, 5), (5, 23, 7, 25)):
        one = [tensors[0][begin:end], *(x[key_begin:key_end] for x in tensors[1:])]
        alone = kernels.attention(*(x.transpose(0, 1)[None] for x in one), causal=True, return_lse=True)
        assert torch.equal(result[begin:end], alone[0][0].transpose(0, 1))
        assert torch.equal(lse[:, begin:end], alone[1][0])


def test_no_sequences():
    tensors, places = packed([], [], after=3)
    result, lse = kernels.attention_packed(*tensors, **places, return_lse=True)
    assert not result.any()
    assert (lse == float("-inf")).all()


@pytest.mark.slow
def test_any_layout_of_inputs_and_gradient():
    tensors = random_inputs(batch=2, heads=1, queries=6, keys=7)
    upstream = randn(2, 1, 6, 16)

    def run(query, key, value, upstream):
        return passes(kernels.attention, (query, key, value), {}, (upstream, torch.zeros(2, 1, 6, device=DEVICE)))[0]

    expected = run(*tensors, upstream)
    for one in range(4):
        for name, x in layouts((*tensors, upstream)[one]):
            changed = [x if place == one else tensor for place, tensor in enumerate((*tensors, upstream))]
            for actual, wanted in zip(run(*changed), expected, strict=True):
                assert torch.equal(actual, wanted), (one, name)
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert all(torch.equal(*pair) for pair in zip(run(*token_major, upstream), expected, strict=True))
    expanded = torch.ones((), device=DEVICE).expand(2, 1, 6, 16)
    assert all(
        torch.equal(*pair) for pair in zip(run(*tensors, expanded), run(*tensors, expanded.clone()), strict=True)
    )


def test_one_tensor_with_query_key_and_value():
    together = randn(2, 9, 3, 2, 16)
    query, key, value = (one.transpose(1, 2) for one in together.unbind(2))
    assert addressable(query) is query
    result = kernels.attention(query, key, value)
    assert result.transpose(1, 2).is_contiguous()
    assert torch.equal(result, kernels.attention(*(one.contiguous() for one in (query, key, value))))


def test_strides_beyond_32_bits():
    """Heads and batches that are 2**31 elements apart, in memory that is never touched in between."""
    apart = 2**31 + 64
    if DEVICE == "cuda":
        pytest.skip("full sizes are tested on a GPU")
    memory = torch.empty(apart + 4096, dtype=FP16)
    wide = memory.as_strided((1, 2, 5, 16), (1, apart, 16, 1))
    x = wide.copy_(randn(1, 2, 5, 16, dtype=FP16))
    assert torch.equal(kernels.attention(x, x, x, causal=True), kernels.attention(*[x.contiguous()] * 3, causal=True))
    assert addressable(memory.as_strided((1, 1, 2, 16), (1, 1, apart, 1))).is_contiguous()


@st.composite
def calls(draw):
    heads, group = draw(st.sampled_from([(1, 1), (2, 2), (2, 1)]))
    queries, keys = draw(st.integers(0, 36)), draw(st.integers(0, 36))
    torch.manual_seed(draw(st.integers(0, 100)))
    tensors = random_inputs(
        1, heads, heads // group, queries, keys, draw(st.integers(1, 33)), draw(st.integers(1, 33)),
        draw(st.sampled_from([FP32, BF16, FP16])),
    )  # fmt: skip
    side = st.none() | st.integers(0, 45)
    options = {
        "causal": draw(st.booleans()),
        "alignment": draw(st.sampled_from(["bottom right", "top left"])),
        "window": draw(st.none() | st.tuples(side, side)),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "bias": draw(st.sampled_from([None, (queries, keys), (heads, 1, keys), (1,)])),
        "slopes": draw(st.sampled_from([None, (heads,)])),
        "sinks": draw(st.sampled_from([None, (heads,)])),
        "dropout": draw(st.sampled_from([0.0, 0.4])),
    }
    for name in ("bias", "slopes", "sinks"):
        if options[name] is not None:
            options[name] = torch.rand(options[name], device=DEVICE)
    return tensors, {**options, "seed": 11}


@pytest.mark.slow
@settings(max_examples=12)
@given(calls())
def test_any_combination(call):
    assert_exact(*call)


@pytest.mark.slow
def test_any_configuration_gives_the_same():
    query, key, value = random_inputs(heads=1, queries=70, keys=70, dim=16, dtype=FP16)
    problem = AttentionProblem(query, key, value, *[None] * 6, 0, 0, -1, 0, True, 0.25, 0.0, 0.0)
    result, lse = attention_triton.forward(problem)
    given = (problem, result, None, result, lse, True, True, False, False)
    gradients = attention_triton.backward(*given)
    for config in attention_tuning.candidates("attention_keys", 64)[::4]:
        again, sums = attention_triton.forward(problem, config=config)
        torch.testing.assert_close((again, sums), (result, lse), atol=2e-3, rtol=2e-3)
        actual = attention_triton.backward(*given, config=config)
        torch.testing.assert_close(actual, gradients, atol=1e-2, rtol=1e-2)


def test_candidates_fit_in_number():
    for kernel in ("attention_forward", "attention_keys", "attention_queries"):
        for dim in (16, 64, 128, 256):
            actual = attention_tuning.candidates(kernel, dim)
            assert 2 <= len(actual) <= 16
            assert len(set(actual)) == len(actual)


@pytest.mark.slow
def test_operators_are_of_torch():
    query, key, value = (one.requires_grad_() for one in random_inputs(heads=2, key_heads=1, queries=5, keys=6))
    bias, sinks = randn(5, 6).requires_grad_(), randn(2).requires_grad_()
    options = (0, 0, -1, 0, True, 0.25, 0.0, 0.0)
    args = (query, key, value, bias, None, sinks, None, None, None, *options)
    opcheck(torch.ops.nearpeak.attention.default, args)
    detached = [one.detach() if isinstance(one, torch.Tensor) else one for one in args]
    result, lse = torch.ops.nearpeak.attention(*detached)
    backward = (result, lse, result, lse, *detached, True, True, True, True)
    opcheck(torch.ops.nearpeak.attention_backward.default, backward)
    tensors, places = packed([3, 2], [4, 1])
    views = [one.transpose(0, 1)[None] for one in tensors]
    starts = (places["query_starts"], places["key_starts"], 3, 4)
    opcheck(torch.ops.nearpeak.attention.default, (*views, None, None, None, None, *starts, *options[2:]))


def test_operators_of_what_the_kernel_does_not_take():
    tensors = [one.double() for one in random_inputs(heads=2, key_heads=1, queries=5, keys=6)]
    bias, sinks = (
        torch.rand(5, 6, dtype=torch.float64, device=DEVICE),
        torch.rand(2, dtype=torch.float64, device=DEVICE),
    )
    seed = torch.tensor(3, device=DEVICE)
    leaves = [one.requires_grad_() for one in (*tensors, bias, sinks)]
    args = (*tensors, bias, None, sinks, seed, None, None, 0, 0, 3, 0, True, 0.25, 2.0, 0.2)
    actual, wanted = (
        torch.autograd.grad(sum(one.sin().sum() for one in function(*args)), leaves)
        for function in (torch.ops.nearpeak.attention, attention_forward)
    )
    torch.testing.assert_close(actual, wanted)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    tensors = [one.requires_grad_() for one in random_inputs(heads=2, key_heads=1, queries=9, keys=9)]

    def function(query, key, value):
        result, lse = kernels.attention(query * 1.0, key, value, causal=True, return_lse=True)
        return kernels.scaled_dot_product_attention(result, result, result).sum() + lse.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, tensors) for one in (actual, expected)))


def test_packed_compiles_without_a_graph_break():
    tensors, places = packed([5, 3], [5, 4])
    compiled = torch.compile(
        lambda *args: kernels.attention_packed(*args, **places), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*tensors), kernels.attention_packed(*tensors, **places))


def test_the_reference_has_derivatives_of_any_order():
    tensors = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(query, key, value, sinks):
        return kernels.attention(query, key, value, sinks=sinks, causal=True, softcap=2.0, return_lse=True)

    with kernels.using("off"):
        assert torch.autograd.gradcheck(function, (*tensors, sinks))
        assert torch.autograd.gradgradcheck(function, (*tensors, sinks))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "floats", "gqa", "flat"])
def test_it_is_torchs_function(kind):
    query, key, value = random_inputs(batch=2, heads=4, key_heads=2 if kind == "gqa" else 4, queries=7, keys=9)
    options = {
        "causal": {"is_causal": True, "scale": 0.3},
        "boolean": {"attn_mask": torch.rand(2, 1, 7, 9, device=DEVICE) < 0.7},
        "floats": {"attn_mask": randn(7, 9)},
        "gqa": {"enable_gqa": True},
        "flat": {"attn_mask": torch.rand(2, 7, 9, device=DEVICE) < 0.7},
    }.get(kind, {})
    if kind == "flat":
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
    actual = kernels.scaled_dot_product_attention(query, key, value, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(actual, expected)


def test_torchs_function_takes_over_what_the_kernel_does_not_take():
    x = randn(1, 2, 4, 16)
    answer = kernels.supports(kernels.scaled_dot_product_attention, x[0, 0], x[0, 0], x[0, 0])
    assert "dimensions" in answer.reason
    with kernels.using("auto"):
        assert kernels.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0]).shape == (4, 16)
        with pytest.raises(RuntimeError):
            kernels.scaled_dot_product_attention(x, x[:, :, :, :8], x)


def test_the_module():
    tensors, module = random_inputs(queries=8), kernels.Attention(causal=True, dropout=0.5)
    assert not torch.equal(module(*tensors), kernels.attention(*tensors, causal=True))
    assert torch.equal(module.eval()(*tensors), kernels.attention(*tensors, causal=True))
    assert "causal=True" in repr(module)


def test_mistakes_are_named():
    query, key, value = random_inputs()
    cases = [
        ((query[0], key, value), {}, r"takes query, key and value"),
        ((query, key[:, :, :5], value), {}, r"the heads and tokens"),
        ((query, key[..., :5], value), {}, r"query the dim of key"),
        ((query.long(), key, value), {}, r"takes floats"),
        (random_inputs(heads=3, key_heads=2), {}, r"3 heads of queries must be a multiple of the 2"),
        ((query, key, value), {"alignment": "top"}, r"no alignment 'top'"),
        ((query, key, value), {"window": (-1, 0)}, r"A window is \(left, right\)"),
        ((query, key, value), {"softcap": 0.0}, r"softcap must be above 0"),
        ((query, key, value), {"dropout": 2.0}, r"from 0 to 1"),
        ((query, key, value), {"bias": randn(5, 5)}, r"broadcast to the scores, \[1, 2, 19, 19\]"),
        ((query, key, value), {"bias": torch.ones(1, dtype=torch.int32, device=DEVICE)}, r"floats to add, or booleans"),
        ((query, key, value), {"slopes": randn(3)}, r"Slopes are \[2\]"),
        ((query, key, value), {"sinks": randn(3)}, r"Sinks are \[2\]"),
    ]
    for tensors, options, message in cases:
        with pytest.raises(UsageError, match=message), kernels.using("auto"):
            kernels.attention(*tensors, **options)
    with pytest.raises(UsageError, match="Starts are int32"):
        kernels.attention_packed(query[0], key[0], value[0], randn(3), randn(3), 1, 1)
    with pytest.raises(KernelUnavailable, match="1 to 256 dimensions, and these have 257"):
        kernels.attention(*random_inputs(dim=257))
    with pytest.raises(KernelUnavailable, match="one dtype"):
        kernels.attention(query, key, value.half())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_full_size_is_exact_and_the_same_in_every_run(dim, causal):
    tensors = [one.requires_grad_() for one in random_inputs(2, 16, 4, 4096, 4096, dim, dtype=BF16)]
    assert_exact([one[:, : 2 if place == 0 else 1] for place, one in enumerate(tensors)], {"causal": causal})
    first = kernels.attention(*tensors, causal=causal)
    upstream = torch.randn_like(first)
    gradients = torch.autograd.grad(first, tensors, upstream, retain_graph=True)
    for _ in range(100):
        assert torch.equal(kernels.attention(*tensors, causal=causal), first)
        again = torch.autograd.grad(first, tensors, upstream, retain_graph=True)
        assert all(torch.equal(*pair) for pair in zip(again, gradients, strict=True))


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count():
    whole = torch.randn(2**15 + 1, 16, 32, 128, device=DEVICE, dtype=BF16).transpose(1, 2)
    assert whole.numel() > 2**31
    result = kernels.attention(whole, whole, whole)
    part = whole[-2:].contiguous()
    assert torch.equal(result[-2:], kernels.attention(part, part, part))


@pytest.mark.gpu
def test_no_scores_are_in_memory():
    tensors = [one.requires_grad_() for one in random_inputs(1, 1, 1, 65536, 65536, 64, dtype=BF16)]
    kernels.attention(*(one[:, :, :128] for one in tensors), causal=True).sum().backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.attention(*tensors, causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * tensors[0].numel() * 2  # all scores would be 8 GB


@pytest.mark.gpu
def test_in_a_cuda_graph_sequences_may_change():
    tensors, places = packed([100, 28], [100, 28], dtype=BF16)
    places["longest_query"] = places["longest_key"] = 128
    kernels.attention_packed(*tensors, **places, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.attention_packed(*tensors, **places, causal=True)
    for middle in (100, 1, 64):
        for starts in (places["query_starts"], places["key_starts"]):
            starts.copy_(torch.tensor([0, middle, 128]))
        graph.replay()
        assert torch.equal(result, kernels.attention_packed(*tensors, **places, causal=True))


@pytest.mark.gpu
def test_compiled_by_inductor():
    tensors = [one.requires_grad_() for one in random_inputs(2, 4, 2, 128, 128, 64, dtype=BF16)]
    compiled = torch.compile(lambda *args: kernels.attention(*args, causal=True), fullgraph=True)
    actual, expected = compiled(*tensors), kernels.attention(*tensors, causal=True)
    assert torch.equal(actual, expected)
    upstream = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(one, tensors, upstream) for one in (actual, expected)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_attention_of_8_bits_is_that_of_quantized_numbers():
    query, key, value = (torch.randn(1, heads, 40, 64, device=DEVICE).bfloat16() for heads in (4, 2, 2))
    with torch.no_grad(), kernels.using("auto"):  # the kernel is for Hopper
        result, lse = kernels.attention_fp8(query, key, value, causal=True, return_lse=True)
        nothing = kernels.attention_fp8(query * 0, key, value * 0)
        exact, exact_lse = kernels.attention.reference(
            *(x.double() for x in (query, key, value)), causal=True, return_lse=True
        )
    assert result.dtype == torch.bfloat16
    difference = (result.double() - exact).norm() / exact.norm()
    assert 0.005 < difference < 0.08
    assert (lse.double() - exact_lse).abs().max() < 0.3
    assert not nothing.any()


def test_attention_of_8_bits_has_no_gradients():
    inputs = [torch.randn(1, 1, 4, 64, device=DEVICE, requires_grad=True) for _ in "qkv"]
    with pytest.raises(UsageError, match="has no gradients"):
        kernels.attention_fp8(*inputs)
    assert "float32" in kernels.supports(kernels.attention_fp8, *(x.detach() for x in inputs)).reason
