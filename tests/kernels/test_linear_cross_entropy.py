"""`linear_cross_entropy` against a linear layer and torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_kernel_is_exact, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import UsageError

pytest.importorskip("triton")
# a CPU without products in bfloat16 says so
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
REDUCTIONS = ("mean", "sum", "none")


def made(tokens=(2, 7), features=16, classes=40, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(*tokens, features, device=DEVICE).to(dtype)
    weight = (0.3 * torch.randn(classes, features, device=DEVICE)).to(dtype)
    bias = torch.randn(classes, device=DEVICE).to(dtype)
    target = torch.randint(0, classes, tokens, device=DEVICE)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return hidden, weight, bias, target


def assert_exact(hidden, weight, bias, target, **options):
    inputs = [one for one in (hidden, weight, bias) if one is not None]

    def call(function):
        return lambda hidden, weight, bias=None: function(hidden, weight, target, bias=bias, **options)

    with kernels.using("require"):
        reference = kernels.linear_cross_entropy.reference
        assert_kernel_is_exact(call(kernels.linear_cross_entropy), call(reference), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk", [None, 5, 2])
def test_values_and_gradients(chunk, reduction, dtype):
    hidden, weight, bias, target = made(dtype=dtype)
    options = {} if chunk else {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}
    assert_exact(hidden, weight, bias if chunk else None, target, reduction=reduction, chunk_tokens=chunk, **options)


def test_weights_of_classes_and_long_rows():
    hidden, weight, bias, target = made((5,), 4, 4099, torch.bfloat16)
    classes = torch.linspace(0.1, 2.0, 4099, device=DEVICE)
    for reduction in ("mean", "none"):
        assert_exact(hidden, weight, bias, target, class_weight=classes, label_smoothing=0.1, reduction=reduction)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 9), st.sampled_from(REDUCTIONS), st.integers(0, 4))
def test_any_shape_and_layout(tokens, classes, chunk, reduction, layout):
    hidden, weight, _, target = made((tokens,), 3, classes)
    ways = list(layouts(hidden)), list(layouts(weight))
    hidden, weight = ways[0][layout % len(ways[0])][1], ways[1][(layout + 1) % len(ways[1])][1]
    assert_exact(hidden, weight, None, target, reduction=reduction, chunk_tokens=chunk)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_only_what_needs_a_gradient_has_one(reduction):
    hidden, weight, bias, target = made()
    for which in range(3):
        leaves = [one.clone() for one in (hidden, weight, bias)]
        leaves[which].requires_grad_()
        loss = kernels.linear_cross_entropy(*leaves[:2], target, bias=leaves[2], reduction=reduction, chunk_tokens=4)
        (actual,) = torch.autograd.grad(loss.sum(), leaves[which])
        with kernels.using("off"):
            loss = kernels.linear_cross_entropy(*leaves[:2], target, bias=leaves[2], reduction=reduction)
        torch.testing.assert_close(actual, torch.autograd.grad(loss.sum(), leaves[which])[0])


def test_many_chunks_add_up_in_float32():
    hidden, weight, _, target = made((24,), 8, 12, torch.bfloat16)
    hidden = hidden.abs() + 1  # shares of one sign: low precision loses what is small beside the sum
    target.fill_(0)
    errors = {}
    exact = weight.double().requires_grad_()
    kernels.linear_cross_entropy.reference(hidden.double(), exact, target, reduction="sum").backward()
    for float32 in (None, True, False):
        leaf = weight.clone().requires_grad_()
        options = {"reduction": "sum", "chunk_tokens": 1, "accumulate_float32": float32}
        kernels.linear_cross_entropy(hidden, leaf, target, **options).backward()
        assert leaf.grad.dtype == torch.bfloat16
        errors[float32] = (leaf.grad.double() - exact.grad).abs().max().item()
    assert errors[None] == errors[True]
    assert errors[True] < errors[False] / 2


def test_logprobs_and_entropies():
    hidden, weight, bias, target = made()
    for softcap in (None, 3.0):
        loss, logprobs, entropies = kernels.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            softcap=softcap,
            chunk_tokens=4,
            return_logprobs=True,
            return_entropy=True,
        )
        logits = torch.nn.functional.linear(hidden, weight, bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        distribution = torch.distributions.Categorical(logits=logits)
        kept = target != -100
        torch.testing.assert_close(entropies[kept], distribution.entropy()[kept])
        torch.testing.assert_close(logprobs[kept], distribution.log_prob(target.where(kept, 0))[kept])
        torch.testing.assert_close(loss, -logprobs.sum() / kept.sum())
        assert not logprobs[~kept].any()
        assert not entropies[~kept].any()
    loss, entropies = kernels.linear_cross_entropy(hidden, weight, target, return_entropy=True)
    assert entropies.shape == target.shape


def test_entropies_of_long_rows():
    hidden, weight, _, target = made((3,), 4, 4099)
    _, entropies = kernels.linear_cross_entropy(hidden, 20 * weight, target, return_entropy=True)
    with kernels.using("off"):
        _, expected = kernels.linear_cross_entropy(hidden.double(), 20 * weight.double(), target, return_entropy=True)
    torch.testing.assert_close(entropies.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_second_backward_pass_multiplies_once(dtype):
    hidden, weight, _, target = made(dtype=dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = kernels.linear_cross_entropy(hidden, weight, target)
    (exact,) = torch.autograd.grad(kernels.linear_cross_entropy.reference(hidden, weight, target), weight)
    for factor, kept in ((3.0, True), (0.0, True), (0.5, False)):
        by = torch.tensor(factor, device=DEVICE)
        _, actual = torch.autograd.grad(loss, [hidden, weight], by, retain_graph=kept)
        torch.testing.assert_close(actual, factor * exact, rtol=5e-3, atol=1e-4)


def test_small_gradients_in_float16_are_not_lost_before_the_loss_is_scaled():
    hidden, weight, _, target = made((64,), 8, 1000, torch.float16)
    weight *= 1e-3
    leaf = weight.clone().requires_grad_()
    (2.0**16 * kernels.linear_cross_entropy(hidden, leaf, target)).backward()
    wide = weight.double().requires_grad_()
    (2.0**16 * kernels.linear_cross_entropy.reference(hidden.double(), wide, target)).backward()
    small = wide.grad.abs() < wide.grad.abs().median()
    error = (leaf.grad.double() - wide.grad)[small].norm() / wide.grad[small].norm()
    assert error < 0.01


def test_no_tokens_and_all_ignored():
    hidden, weight, _, target = made()
    for reduction in REDUCTIONS:
        for tokens, wanted in ((hidden[:0], target[:0]), (hidden, torch.full_like(target, -100))):
            leaf = weight.clone().requires_grad_()
            loss = kernels.linear_cross_entropy(tokens, leaf, wanted, reduction=reduction)
            assert loss.isnan().all() if reduction == "mean" else not loss.any()
            loss.sum().backward()
            assert not leaf.grad.any()


def test_chunks():
    from nearpeak.kernels.losses.triton import tokens_per_chunk

    def chunk(tokens, columns, itemsize=2, requested=0, depth=2048):
        return tokens_per_chunk(tokens, torch.empty(1).expand(columns, depth), itemsize, requested)

    assert chunk(8192, 128256) == 4096
    assert chunk(5, 128256) == 5
    assert chunk(100, 10, itemsize=4, requested=7) == 7
    assert chunk(0, 10, itemsize=4) == 1
    assert chunk(10**6, 10**7, itemsize=4) == 128


@pytest.mark.parametrize("depth", [2048, 4096])
def test_chunks_of_a_language_model(depth):
    """In 16 bits with 128,256 classes 4,096 tokens were faster than 2,048; memory is at most 1 GiB."""
    from nearpeak.kernels.losses.triton import FEW_CHUNKS, tokens_per_chunk

    for tokens in (4096, 8192, 16384):
        for columns in (32000, 128256, 151936):
            chunk = tokens_per_chunk(tokens, torch.empty(1).expand(columns, depth), 2, 0)
            assert chunk * columns * 2 <= 2**30
            assert -(-tokens // chunk) <= FEW_CHUNKS
    assert tokens_per_chunk(16384, torch.empty(1).expand(128256, depth), 2, 0) == 4096
    assert tokens_per_chunk(16384, torch.empty(1).expand(32000, depth), 2, 0) == 16384, "all logits are less than 1 GiB"


def test_autocast_takes_the_dtype_of_linear():
    hidden, weight, bias, target = made()
    weight.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = kernels.linear_cross_entropy(hidden, weight, target, bias=bias)
        expected = kernels.linear_cross_entropy.reference(hidden, weight, target, bias=bias)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.dtype == torch.float32


@pytest.mark.slow
def test_operators_are_those_of_torch():
    operators = torch.ops.nearpeak
    hidden, weight, bias, target = (one.requires_grad_(one.is_floating_point()) for one in made((3,), 4, 6))
    for reduction, ahead in (("mean", True), ("none", False)):
        rest = (-100, 0.1, 2.0, 0.01, reduction, 2, None)
        inputs = (hidden, weight, bias, target, None, *rest, True, True, ahead, ahead, ahead)
        opcheck(operators.linear_cross_entropy.default, inputs)
        *_, statistics, parts = (one.detach() for one in operators.linear_cross_entropy(*inputs))
        upstream = torch.ones(3 if reduction == "none" else (), device=DEVICE)
        tensors = [one.detach() for one in (upstream, hidden, weight, bias, target)]
        opcheck(
            operators.linear_cross_entropy_backward.default,
            (*tensors, None, statistics, parts, *rest, True, True, True),
        )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operators_in_plain_torch(reduction):
    from nearpeak.kernels import losses as plain

    hidden, weight, bias, target = made()
    rest = (-100, 0.1, 2.0, 0.01, reduction, 4, None)
    inputs = (hidden, weight, bias, target, None, *rest, True, True, True, True, True)
    actual, expected = plain._linear_forward_reference(*inputs), plain.linear_cross_entropy_forward(*inputs)
    for one, other in zip(actual[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other)
    upstream = torch.full((2, 7) if reduction == "none" else (), 2.0, device=DEVICE)
    more = (upstream, hidden, weight, bias, target, None, *actual[-2:], *rest, True, True, True)
    for one, other in zip(
        plain._linear_backward_reference(*more), plain.linear_cross_entropy_backward(*more), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_compiles_without_a_graph_break(reduction):
    hidden, weight, _, target = made((5,))

    def loss(hidden, weight):
        return 3 * kernels.linear_cross_entropy(2 * hidden, weight, target, reduction=reduction).sum()

    leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
    actual = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(loss(*leaves), leaves))


def test_what_has_no_meaning_is_said():
    hidden, weight, bias, target = made()
    for mode in ("auto", "off"):
        with kernels.using(mode):
            with pytest.raises(UsageError, match=r"shape \[classes, 16\].*has \(40, 15\)"):
                kernels.linear_cross_entropy(hidden, weight[:, 1:], target)
            with pytest.raises(UsageError, match="bias needs"):
                kernels.linear_cross_entropy(hidden, weight, target, bias=bias[1:])
            with pytest.raises(UsageError, match="at least 1"):
                kernels.linear_cross_entropy(hidden, weight, target, chunk_tokens=0)
            with pytest.raises(UsageError, match="Targets need"):
                kernels.linear_cross_entropy(hidden, weight, target[0])
    assert "one dtype" in kernels.supports(kernels.linear_cross_entropy, hidden.half(), weight, target).reason
    with pytest.raises(RuntimeError, match="no second derivative"):
        loss = kernels.linear_cross_entropy(hidden, weight.requires_grad_(), target)
        torch.autograd.grad(loss, weight, create_graph=True)


def test_gradients_of_the_reference():
    hidden, weight, bias, target = made((3,), 4, 5)
    leaves = [one.double().requires_grad_() for one in (hidden, weight, bias)]

    def loss(hidden, weight, bias):
        return kernels.linear_cross_entropy(hidden, weight, target, bias=bias, z_loss=0.01, softcap=3.0)

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.gpu
def test_a_large_one_and_its_memory():
    torch.manual_seed(0)
    hidden = torch.randn(8192, 4096, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(128256, 4096, device="cuda") / 64).bfloat16().requires_grad_()
    target = torch.randint(0, 128256, (8192,), device="cuda")
    target[::5] = -100
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = kernels.linear_cross_entropy(hidden, weight, target)
    actual = torch.autograd.grad(loss, [hidden, weight])
    taken = torch.cuda.max_memory_allocated() - before - sum(one.nbytes for one in actual)
    assert taken < 2**30
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), target), rtol=1e-4, atol=1e-4
    )
    part = slice(0, 512)
    logits = (hidden[part].detach() @ weight.t()).float()
    by_logits = logits.softmax(-1)
    kept = target[part] != -100
    by_logits[torch.arange(512, device="cuda"), target[part].where(kept, 0)] -= 1
    by_logits *= kept[:, None] / (target != -100).sum()
    torch.testing.assert_close(actual[0][part].float(), by_logits @ weight.float(), rtol=2**-6, atol=2e-7)
    first = [one.clone() for one in actual]
    for _ in range(5):
        again = torch.autograd.grad(kernels.linear_cross_entropy(hidden, weight, target), [hidden, weight])
        assert all(map(torch.equal, again, first))


@pytest.mark.gpu
def test_compiled_with_inductor():
    hidden, weight, _, target = made((256,), 64, 32000, torch.bfloat16)
    leaves = [one.requires_grad_() for one in (hidden, weight)]

    def loss(hidden, weight):
        return kernels.linear_cross_entropy(2 * hidden, weight, target, softcap=30.0)

    actual = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(loss(*leaves), leaves), rtol=2**-6, atol=1e-6)


def test_rows_of_logits_begin_at_multiples_of_128_bytes():
    hidden, weight = torch.ones(5, 3, dtype=torch.bfloat16), torch.ones(77, 3, dtype=torch.bfloat16)
    from nearpeak.kernels.losses import triton as losses

    chunks = list(losses._logits_by_chunk(hidden, weight, None, 2))
    assert [(first, logits.shape, logits.stride()) for first, _, logits in chunks] == [
        (0, (2, 77), (128, 1)), (2, (2, 77), (128, 1)), (4, (1, 77), (128, 1)),
    ]  # fmt: skip
    assert all(logits.eq(3).all() for _, _, logits in chunks)
