"""`dropout_add`: the mask against Philox in plain torch, exactly, and its statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_kernel_is_exact, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError
from nearpeak.kernels._runtime import philox
from nearpeak.kernels._runtime.philox import CHUNK, keep_mask, random_numbers

pytest.importorskip("triton")

import triton
import triton.language as tl

from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels.pointwise import triton as pointwise_triton
from nearpeak.kernels.pointwise.triton import philox_numbers

BF16 = torch.bfloat16
SEED = 1234567890123456789


@pytest.fixture(autouse=True)
def seeded_and_required():
    torch.manual_seed(0)
    with kernels.using("require"):
        yield


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def mask_of_kernel(shape, p, seed, dtype=torch.float32):
    """Which elements the kernel keeps."""
    ones, zeros = torch.ones(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype, device=DEVICE)
    return kernels.dropout_add(ones, zeros, p, seed=seed) != 0


def test_philox_is_that_of_its_authors(monkeypatch):
    """The known answers of Random123 for ten rounds, through the code that makes the masks."""
    monkeypatch.setattr(philox, "ROUNDS", 10)
    zero = philox._philox(torch.tensor(0), torch.tensor([0]))
    assert [hex(number) for number in zero[:, 0].tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (CHUNK + 1,), (2, 0, 5), ()], ids=str)
def test_values_and_gradients(shape, dtype):
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    assert_kernel_is_exact(
        lambda x, residual: kernels.dropout_add(x, residual, 0.3, seed=SEED),
        lambda x, residual: kernels.dropout_add.reference(x, residual, 0.3, seed=SEED),
        [x, residual],
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, -1, SEED, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.999, 1.0])
def test_the_mask_is_that_of_the_reference(seed, p):
    shape = torch.Size([CHUNK + 100])
    assert torch.equal(mask_of_kernel(shape, p, seed), keep_mask(torch.tensor(seed, device=DEVICE), shape, p))


@pytest.mark.slow
def test_the_mask_depends_on_nothing_but_seed_place_and_p():
    shape = (3, CHUNK)
    mask = mask_of_kernel(shape, 0.4, 5)
    assert torch.equal(mask.view(-1), mask_of_kernel((3 * CHUNK,), 0.4, 5))
    assert torch.equal(mask[:1], mask_of_kernel((1, CHUNK), 0.4, 5))
    for dtype in DTYPES:
        assert torch.equal(mask, mask_of_kernel(shape, 0.4, 5, dtype))
    x, residual = torch.ones(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)
    seed = torch.tensor(5, device=DEVICE)
    for config in pointwise_triton.dropout_candidates(x.numel()):
        assert torch.equal(mask, pointwise_triton.dropout_add(x, residual, seed, 0.4, config=config) != 0)
    assert not torch.equal(mask, mask_of_kernel(shape, 0.4, 6))


@pytest.mark.slow
def test_any_layout_of_inputs_and_gradient():
    x, residual, upstream = randn(3, 4, 5), randn(3, 4, 5), randn(3, 4, 5)

    def run(x, residual, upstream):
        leaves = [one.detach().requires_grad_() for one in (x, residual)]
        result = kernels.dropout_add(*leaves, 0.5, seed=3)
        return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]

    expected = run(x, residual, upstream)
    for (name, one), (other_name, other) in itertools.product(layouts(x), layouts(upstream)):
        for actual, wanted in zip(run(one, residual, other), expected, strict=True):
            assert torch.equal(actual, wanted), (name, other_name)
    for actual, wanted in zip(run(x, residual.mT.contiguous().mT, upstream), expected, strict=True):
        assert torch.equal(actual, wanted)
    expanded = run(x, residual, torch.ones((), device=DEVICE).expand(3, 4, 5))
    assert torch.equal(expanded[1], 2.0 * keep_mask(torch.tensor(3, device=DEVICE), x.shape, 0.5))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.floats(0.0, 1.0))
def test_any_shape_dtype_and_probability(shape, x_dtype, residual_dtype, p):
    x, residual = randn(*shape, dtype=x_dtype).requires_grad_(), randn(*shape, dtype=residual_dtype).requires_grad_()
    actual = kernels.dropout_add(x, residual, p, seed=9)
    expected = kernels.dropout_add.reference(x, residual, p, seed=9)
    assert actual.dtype == (x.detach() + residual.detach()).dtype
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(one.float().sum(), (x, residual)) for one in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_without_training_or_probability_it_adds():
    x, residual = randn(4, 5), randn(4, 5)
    assert torch.equal(kernels.dropout_add(x, residual, 0.7, training=False), x + residual)
    assert torch.equal(kernels.dropout_add(x, residual, 0.0), x + residual)


def test_all_is_dropped():
    x, residual = torch.full((4, 5), float("inf"), device=DEVICE).requires_grad_(), randn(4, 5)
    result = kernels.dropout_add(x, residual, 1.0)
    assert torch.equal(result, residual)
    assert not torch.autograd.grad(result.sum(), x)[0].any()


def test_statistics_of_the_mask():
    """A fair share is kept; neighbors, in memory, in quarters of a chunk and by seed, know nothing of each other."""
    elements, p = 2**20, 0.1
    deviation = (p * (1 - p) / elements) ** 0.5
    masks = [keep_mask(torch.tensor(seed), torch.Size([elements]), p).double() for seed in (0, 1, 2**32)]
    for mask in masks:
        assert abs(mask.mean().item() - (1 - p)) < 5 * deviation
    dropped = [1 - mask - p for mask in masks]
    pairs = [(dropped[0], dropped[0].roll(lag)) for lag in (1, 2, 8, CHUNK // 4, CHUNK)]
    pairs += list(itertools.combinations(dropped, 2))
    for one, other in pairs:
        assert abs((one * other).mean().item()) < 5 * p * (1 - p) / elements**0.5
    bits = random_numbers(torch.tensor(7), elements)
    for bit in range(32):
        assert abs(((bits >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / elements**0.5


@triton.jit
def numbers_kernel(result, first):
    counter = first + tl.arange(0, 16)
    one, two, three, four = philox_numbers(tl.cast(11, tl.int64), counter, (counter * 0).to(tl.uint32))
    at = result + tl.arange(0, 16)
    tl.store(at, one.to(tl.int64))
    tl.store(at + 16, two.to(tl.int64))
    tl.store(at + 32, three.to(tl.int64))
    tl.store(at + 48, four.to(tl.int64))


def test_counters_beyond_32_bits():
    """What elements from 2**34 on have."""
    result = torch.empty(4, 16, dtype=torch.int64, device=DEVICE)
    launch(numbers_kernel, (1, 1, 1), result, 2**32 - 8)
    counter = 2**32 - 8 + torch.arange(16, device=DEVICE)
    assert torch.equal(result, philox._philox(torch.tensor(11, device=DEVICE), counter))
    assert not torch.equal(result[:, 8:], philox._philox(torch.tensor(11, device=DEVICE), counter[8:] - 2**32))


def test_the_seed_is_drawn_from_the_generator_of_torch():
    x, residual = torch.ones(100, device=DEVICE), torch.zeros(100, device=DEVICE)
    torch.manual_seed(3)
    first, second = (kernels.dropout_add(x, residual, 0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(kernels.dropout_add(x, residual, 0.5), first)
    with kernels.using("off"):
        assert torch.equal(kernels.dropout_add(x, residual, 0.5), second)


def test_a_seed_as_a_tensor():
    x, residual = randn(50), randn(50)
    expected = kernels.dropout_add(x, residual, 0.5, seed=17)
    for shape in ((), (1,)):
        seed = torch.full(shape, 17, device=DEVICE)
        assert torch.equal(kernels.dropout_add(x, residual, 0.5, seed=seed), expected)


@pytest.mark.slow
def test_operators_are_of_torch():
    x, residual = (randn(3, 5).requires_grad_() for _ in range(2))
    seed = torch.tensor(4, device=DEVICE)
    opcheck(torch.ops.nearpeak.dropout_add.default, (x, residual, seed, 0.5))
    opcheck(torch.ops.nearpeak.dropout_add.default, (x.detach().t(), residual.detach().t().to(BF16), seed, 0.5))
    opcheck(torch.ops.nearpeak.dropout_add_backward.default, (x.detach().t(), seed, 0.5, BF16))


def test_it_compiles_without_a_graph_break():
    x, residual = (randn(3, 5).requires_grad_() for _ in range(2))
    compiled = torch.compile(
        lambda x, residual: kernels.dropout_add(x, residual, 0.5), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(1)
    actual = compiled(x, residual)
    torch.manual_seed(1)
    expected = kernels.dropout_add(x, residual, 0.5)
    assert torch.equal(actual, expected)
    gradients = [torch.autograd.grad(one.square().sum(), (x, residual)) for one in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_the_reference_has_derivatives_of_any_order():
    x, residual = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with kernels.using("off"):
        assert torch.autograd.gradcheck(lambda *args: kernels.dropout_add(*args, 0.4, seed=2), (x, residual))
        assert torch.autograd.gradgradcheck(lambda *args: kernels.dropout_add(*args, 0.4, seed=2), (x, residual))


def test_the_module():
    module, x, residual = kernels.DropoutAdd(0.5), randn(30), randn(30)
    assert not torch.equal(module(x, residual), x + residual)
    assert torch.equal(module.eval()(x, residual), x + residual)


def test_mistakes_are_named():
    x = randn(3)
    with pytest.raises(UsageError, match=r"from 0 to 1, and this is 1\.5"):
        kernels.dropout_add(x, x, 1.5)
    with pytest.raises(UsageError, match=r"one shape.*\(3,\).*\(4,\)"):
        kernels.dropout_add(x, randn(4))
    with pytest.raises(UsageError, match=r"one number of int64.*float32"):
        kernels.dropout_add(x, x, seed=torch.ones((), device=DEVICE))
    with pytest.raises(UsageError, match="64 bits"):
        kernels.dropout_add(x, x, seed=2**63)
    with pytest.raises(KernelUnavailable, match=r"dropout_add cannot run: .*float64"):
        kernels.dropout_add(x.double(), x)


@pytest.mark.gpu
def test_full_size_is_exact_and_the_same_in_every_run():
    x, residual = (randn(16384, 4096, dtype=BF16).requires_grad_() for _ in range(2))
    first = kernels.dropout_add(x, residual, 0.1, seed=SEED)
    torch.testing.assert_close(first, kernels.dropout_add.reference(x, residual, 0.1, seed=SEED), rtol=0.0, atol=0.0)
    (gradient,) = torch.autograd.grad(first, x, residual, retain_graph=True)
    for _ in range(100):
        assert torch.equal(kernels.dropout_add(x, residual, 0.1, seed=SEED), first)
        assert torch.equal(torch.autograd.grad(first, x, residual, retain_graph=True)[0], gradient)


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count():
    x = torch.ones(2**31 + CHUNK, dtype=BF16, device=DEVICE)
    result = kernels.dropout_add(x, torch.zeros_like(x), 0.5, seed=3)
    start = 2**31 // 4
    counter = start + torch.arange(CHUNK // 4, device=DEVICE)
    numbers = philox._philox(torch.tensor(3, device=DEVICE), counter)
    assert torch.equal(result[2**31 :] != 0, numbers.view(-1) < philox.threshold(0.5))


@pytest.mark.gpu
def test_in_a_cuda_graph_each_replay_has_another_mask():
    x, residual = torch.ones(2**16, device=DEVICE), torch.zeros(2**16, device=DEVICE)
    kernels.dropout_add(x, residual, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = kernels.dropout_add(x, residual, 0.5)
        given = kernels.dropout_add(x, residual, 0.5, seed=8)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
    assert torch.equal(given, kernels.dropout_add(x, residual, 0.5, seed=8))


@pytest.mark.gpu
def test_compiled_by_inductor():
    x, residual = (randn(64, 512).requires_grad_() for _ in range(2))
    compiled = torch.compile(lambda x, residual: kernels.dropout_add(x, residual, 0.5), fullgraph=True)
    torch.manual_seed(1)
    first = compiled(x, residual)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    dropped = first == residual
    assert 0.4 < dropped.float().mean().item() < 0.6
    assert torch.equal(gradient == 0, dropped)
    torch.manual_seed(1)
    assert torch.equal(compiled(x, residual), first)
