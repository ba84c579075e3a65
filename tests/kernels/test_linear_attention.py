"""Linear attention: results and all gradients against float64, in chunks and segments, causal and not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, TIMES, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError
from nearpeak.kernels.linear_attention import naive_linear_attention

pytest.importorskip("triton")

from nearpeak.kernels.linear_attention import triton as linear_attention_triton
from nearpeak.kernels.linear_attention import tuning

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without products in bfloat16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def seeded_and_required():
    torch.manual_seed(0)
    with kernels.using("require"):
        yield


@pytest.fixture
def segments(monkeypatch):
    """Makes segments of 128 tokens, so that short sequences have several."""
    monkeypatch.setattr(linear_attention_triton, "segment_length", lambda *args: 128)


def randn(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def random_inputs(batch=1, heads=1, key_heads=None, queries=19, keys=None, dim=16, value_dim=None, dtype=FP32):
    keys, key_heads = queries if keys is None else keys, key_heads or heads
    return (
        randn(batch, heads, queries, dim, dtype=dtype),
        randn(batch, key_heads, keys, dim, dtype=dtype),
        randn(batch, key_heads, keys, value_dim or dim, dtype=dtype),
    )


def passes(function, tensors, upstream, **options):
    leaves = [one.detach().requires_grad_() for one in tensors]
    result = function(*leaves, **options)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(result.dtype))]


def assert_exact(tensors, **options):
    """The rule of `kernel_checks`, with a unit in the last place of what is summed up, not of the sum.

    A query that sees one key has a gradient of 0, as the difference of two equal sums of values times gradients.
    """
    query, _, value = tensors
    upstream = randn(*query.shape[:3], value.shape[3], dtype=query.dtype)
    actual = passes(kernels.linear_attention, tensors, upstream, **options)
    reference = kernels.linear_attention.reference
    exact = passes(reference, [one.double() for one in tensors], upstream, **options)
    low = passes(reference, tensors, upstream, **options)
    value_size, upstream_size = (one.abs().max().item() if one.numel() else 0.0 for one in (value, upstream))
    summed = value_size * upstream_size * value.shape[3] ** 0.5
    for place, (one, right, torchs) in enumerate(zip(actual, exact, low, strict=True)):
        assert one.shape == right.shape
        assert one.dtype == torchs.dtype
        if not one.numel():
            continue
        assert one.isfinite().all()
        error, allowed = ((x.double() - right).abs().max().item() for x in (one, torchs))
        size = max(right.abs().max().item(), 0.5 * summed if place else 0.0)
        limit = TIMES * allowed + 2.0 * torch.finfo(one.dtype).eps * size
        assert error <= limit, f"{place}: off by {error:.3g}, torch by {allowed:.3g}, size {size:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims, dtype",
    [
        *[(dims, BF16) for dims in ((32, 32), (64, 128), (128, 64), (40, 7), (1, 1))],
        *[(dims, dtype) for dims in ((64, 32), (20, 33)) for dtype in (FP32, FP16)],
    ],
    ids=str,
)
def test_dims_and_dtypes(dims, dtype):
    assert_exact(random_inputs(queries=20, dim=dims[0], value_dim=dims[1], dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens, causal",
    [*[(tokens, True) for tokens in (1, 63, 64, 65, 129, 300)], (1, False), (129, False), (300, False)],
)
def test_lengths_in_chunks_and_segments(tokens, causal, segments):
    assert_exact(random_inputs(queries=tokens, dim=32, dtype=BF16), causal=causal)


@pytest.mark.parametrize("tokens", [40, 200])
def test_one_segment_is_as_several(tokens, monkeypatch):
    tensors = random_inputs(queries=tokens, dim=16)
    one = kernels.linear_attention(*tensors)
    monkeypatch.setattr(linear_attention_triton, "segment_length", lambda *args: 128)
    torch.testing.assert_close(kernels.linear_attention(*tensors), one)


@pytest.mark.slow
@pytest.mark.parametrize("heads, key_heads", [(2, 1), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_that_share_keys(heads, key_heads, causal, segments):
    assert_exact(
        random_inputs(batch=3 - key_heads, heads=heads, key_heads=key_heads, queries=140, dim=16, dtype=BF16),
        causal=causal,
    )


@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 150), (150, 5), (0, 5), (5, 0), (0, 0)])
def test_queries_that_see_all_keys(queries, keys, segments):
    assert_exact(random_inputs(queries=queries, keys=keys, dtype=BF16), causal=False)


def test_nothing():
    for sizes in ({"batch": 0}, {"queries": 0}, {"heads": 2, "batch": 0}):
        assert_exact(random_inputs(**sizes))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 3.0])
def test_eps(eps):
    assert_exact(random_inputs(queries=10), eps=eps)


@pytest.mark.slow
@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.integers(1, 2), st.sampled_from([(1, 1), (2, 1)]), st.integers(1, 40), st.integers(1, 33),
    st.integers(1, 33), st.booleans(),
)  # fmt: skip
def test_any_shape(batch, heads, tokens, dim, value_dim, causal):
    tensors = random_inputs(batch, *heads, tokens, None, dim, value_dim, dtype=BF16)
    assert_exact(tensors, causal=causal)


def test_results_are_means_of_values(segments):
    query, key, _ = random_inputs(queries=200, dtype=BF16)
    ones = torch.ones(1, 1, 200, 8, device=DEVICE, dtype=BF16)
    for causal in (True, False):
        result = kernels.linear_attention(query, key, ones, causal=causal, eps=0.0)
        torch.testing.assert_close(result, ones, atol=0.01, rtol=0.0)
    value = randn(1, 1, 200, 8)
    alike = kernels.linear_attention(*(torch.zeros(1, 1, 200, 4, device=DEVICE),) * 2, value, eps=0.0)
    means = value.cumsum(2) / torch.arange(1, 201, device=DEVICE)[:, None]
    torch.testing.assert_close(alike, means)


def test_a_result_does_not_depend_on_later_tokens(segments):
    query, key, value = random_inputs(queries=150)
    changed = [one.clone() for one in (key, value)]
    for one in changed:
        one[:, :, 70:] = 5.0
    before, after = kernels.linear_attention(query, key, value), kernels.linear_attention(query, *changed)
    assert torch.equal(before[:, :, :70], after[:, :, :70])
    assert not torch.equal(before[:, :, 70:], after[:, :, 70:])


def test_sums_beyond_float16():
    """Weights of 20,000 and gradients of 1e-6 of them, where float16 ends at 65,504 and at 6e-8."""
    tensors = [20 * one.abs() for one in random_inputs(queries=300, dim=16, dtype=FP16)]
    upstream = randn(1, 1, 300, 16, dtype=FP16)
    actual = passes(kernels.linear_attention, tensors, upstream)
    exact = passes(kernels.linear_attention.reference, [one.double() for one in tensors], upstream)
    for one, right in zip(actual, exact, strict=True):
        torch.testing.assert_close(one.double(), right, atol=2e-3 * right.abs().max().item(), rtol=0.01)


def test_large_and_infinite_numbers():
    query, key, value = random_inputs(queries=20)
    query[0, 0, 3], key[0, 0, 5] = -200.0, -float("inf")
    result = kernels.linear_attention(query, key, value, eps=1e-3)
    assert result.isfinite().all()
    assert result[0, 0, 3].abs().max() < 1e-6
    value[0, 0, 9] = float("nan")
    result = kernels.linear_attention(query, key, value)
    assert result[0, 0, 9:].isnan().all()  # and those before it in its chunk, as with any product that is masked


@pytest.mark.slow
def test_any_layout_of_inputs_and_gradient():
    tensors = random_inputs(queries=6, dim=8, dtype=BF16)
    upstream = randn(1, 1, 6, 8, dtype=BF16)
    expected = passes(kernels.linear_attention, tensors, upstream)
    for place in range(4):
        for name, x in layouts((*tensors, upstream)[place]):
            changed = [x if at == place else one for at, one in enumerate((*tensors, upstream))]
            actual = passes(kernels.linear_attention, changed[:3], changed[3])
            assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True)), (place, name)
    expanded = torch.ones((), device=DEVICE, dtype=BF16).expand(1, 1, 6, 8)
    actual, wanted = (passes(kernels.linear_attention, tensors, one) for one in (expanded, expanded.clone()))
    assert all(torch.equal(*pair) for pair in zip(actual, wanted, strict=True))


def test_one_tensor_with_query_key_and_value():
    together = randn(1, 9, 3, 2, 16)
    query, key, value = (one.transpose(1, 2) for one in together.unbind(2))
    result = kernels.linear_attention(query, key, value)
    assert result.transpose(1, 2).is_contiguous()
    assert torch.equal(result, kernels.linear_attention(*(one.contiguous() for one in (query, key, value))))


@pytest.mark.skipif(DEVICE == "cuda", reason="full sizes are tested on a GPU")
def test_strides_beyond_32_bits():
    """Heads that are 2**31 elements apart, in memory that is never touched in between."""
    apart = 2**31 + 64
    memory = torch.empty(apart + 4096, dtype=FP16)
    x = memory.as_strided((1, 2, 5, 16), (1, apart, 16, 1)).copy_(randn(1, 2, 5, 16, dtype=FP16))
    dense = x.contiguous()
    actual, wanted = (passes(kernels.linear_attention, (one,) * 3, dense) for one in (x, dense))
    assert all(torch.equal(*pair) for pair in zip(actual, wanted, strict=True))


def test_only_wanted_gradients():
    for place in range(3):
        leaves = [one.requires_grad_(at == place) for at, one in enumerate(random_inputs(queries=9))]
        (actual,) = torch.autograd.grad(kernels.linear_attention(*leaves).sum(), [leaves[place]])
        with kernels.using("off"):
            (wanted,) = torch.autograd.grad(kernels.linear_attention(*leaves).sum(), [leaves[place]])
        torch.testing.assert_close(actual, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_the_operators_are_of_torch(causal):
    tensors = [one.requires_grad_() for one in random_inputs(heads=2, key_heads=1, queries=3)]
    checks = (
        "test_schema",
        "test_faketensor",
        "test_autograd_registration",
        *(("test_aot_dispatch_dynamic",) if causal else ()),
    )
    opcheck(torch.ops.nearpeak.linear_attention.default, (*tensors, causal, 1e-6), test_utils=checks)
    detached = [one.detach() for one in tensors]
    result, norms = torch.ops.nearpeak.linear_attention(*detached, causal, 1e-6)
    args = (randn(*result.shape), result, norms, *detached, causal, True, not causal, not causal)
    opcheck(torch.ops.nearpeak.linear_attention_backward.default, args, test_utils=checks[:2])


@pytest.mark.parametrize("causal", [True, False])
def test_operators_have_their_references(causal):
    """The operators called by name with what the kernel does not take, float64: reference and autograd agree."""
    tensors = [one.double().requires_grad_() for one in random_inputs(heads=2, key_heads=1, queries=7)]
    result, norms = torch.ops.nearpeak.linear_attention(*tensors, causal, 1e-6)
    assert norms.dtype == torch.float64
    upstream = randn(*result.shape).double()
    actual = torch.autograd.grad(result, tensors, upstream)
    with kernels.using("off"):
        wanted = torch.autograd.grad(kernels.linear_attention(*tensors, causal=causal), tensors, upstream)
    for pair in zip(actual, wanted, strict=True):
        torch.testing.assert_close(*pair)


def test_the_reference_has_right_gradients():
    tensors = [one.double().requires_grad_() for one in random_inputs(heads=2, key_heads=1, queries=4, dim=3)]
    with kernels.using("off"):
        assert torch.autograd.gradcheck(kernels.linear_attention, tensors)


@pytest.mark.parametrize("causal", [True, False])
def test_the_naive_form_is_the_same(causal):
    tensors = [one.double() for one in random_inputs(heads=4, key_heads=2, queries=11, value_dim=5)]
    with kernels.using("off"):
        wanted = kernels.linear_attention(*tensors, causal=causal)
    torch.testing.assert_close(naive_linear_attention(*tensors, causal=causal), wanted)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    tensors = [one.requires_grad_() for one in random_inputs(queries=12)]
    compiled = torch.compile(
        lambda *given: kernels.linear_attention(*given).square().sum(), fullgraph=True, backend="aot_eager"
    )
    actual = torch.autograd.grad(compiled(*tensors), tensors)
    wanted = torch.autograd.grad(kernels.linear_attention(*tensors).square().sum(), tensors)
    for pair in zip(actual, wanted, strict=True):
        torch.testing.assert_close(*pair)


def test_what_it_does_not_take():
    query, key, value = random_inputs()
    assert "one dtype" in kernels.supports(kernels.linear_attention, query, key, value.half()).reason
    assert "no heads" in kernels.supports(kernels.linear_attention, query[:, :0], key, value).reason
    assert "1 to 128" in kernels.supports(kernels.linear_attention, *random_inputs(dim=129)).reason
    with pytest.raises(KernelUnavailable, match="float64"):
        kernels.linear_attention(*(one.double() for one in (query, key, value)))


def test_mistakes_are_named():
    query, key, value = random_inputs()
    for tensors, options, message in [
        ((query[0], key, value), {}, r"takes \[batch, heads, tokens, dim\]"),
        ((query, key[..., :8], value), {}, "query the dim of key"),
        ((query[:, :, :5], key, value), {}, "5 queries and 19 keys"),
        ((query, key, value), {"eps": -1.0}, "eps must be 0 or above"),
        ((query.long(), key, value), {}, "takes floats"),
        ((query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)), {}, "must be a multiple"),
    ]:
        with pytest.raises(UsageError, match=message), kernels.using("auto"):
            kernels.linear_attention(*tensors, **options)


def test_the_module():
    module = kernels.LinearAttention(causal=False, eps=0.5)
    tensors = random_inputs()
    assert torch.equal(module(*tensors), kernels.linear_attention(*tensors, causal=False, eps=0.5))
    assert repr(module) == "LinearAttention(causal=False, eps=0.5)"


def test_segments_fill_a_gpu_and_are_not_too_short():
    device = torch.device("cpu")  # stands for an H200
    segment = tuning.segment_length(16384, 16, 2, 2, device)
    assert segment % 128 == 0
    assert 132 <= 16 * 2 * -(-16384 // segment) <= 2 * 132
    assert tuning.segment_length(16384, 1000, 2, 2, device) >= 16384
    assert tuning.segment_length(5, 1, 1, 2, device) == 256
    for kernel in ("linear_attention", "linear_attention_states"):
        actual = [tuning.candidates(widest, kernel) for widest in (64, 128)]
        assert tuning.heuristic(kernel, BF16) in actual[0]
        assert all(config in actual[1] for config in actual[0])
        assert all(128 % config.rows == 0 and config.warps == 4 for config in actual[1])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_at_full_size(causal, dim):
    tensors = random_inputs(heads=4, queries=8192, dim=dim, dtype=BF16)
    assert_exact(tensors, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_hundred_launches_are_equal(dtype):
    tensors = random_inputs(heads=16, queries=4096, dim=128, dtype=dtype)
    upstream = randn(1, 16, 4096, 128, dtype=dtype)
    first = passes(kernels.linear_attention, tensors, upstream)
    for _ in range(100):
        again = passes(kernels.linear_attention, tensors, upstream)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.gpu
def test_in_a_cuda_graph():
    tensors = random_inputs(heads=16, queries=2048, dim=128, dtype=BF16)
    expected = kernels.linear_attention(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.linear_attention(*tensors)
    result.zero_()
    graph.replay()
    assert torch.equal(result, expected)


@pytest.mark.gpu
def test_compiled_by_inductor():
    tensors = [one.requires_grad_() for one in random_inputs(heads=4, queries=1000, dim=64, dtype=BF16)]
    compiled = torch.compile(lambda *given: kernels.linear_attention(*given).float().square().sum(), fullgraph=True)
    actual = torch.autograd.grad(compiled(*tensors), tensors)
    wanted = torch.autograd.grad(kernels.linear_attention(*tensors).float().square().sum(), tensors)
    for pair in zip(actual, wanted, strict=True):
        torch.testing.assert_close(*pair, atol=1e-2, rtol=1e-2)
