"""`softmax` and `log_softmax`: values, gradients, masks, causality, in all three ways of running."""

from __future__ import annotations

import functools

import kernel_checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, gradients, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import UsageError
from nearpeak.kernels.softmax import log_reference, reference

pytest.importorskip("triton")

from nearpeak.kernels._runtime.row_barrier import SplitConfig
from nearpeak.kernels._runtime.rows import as_rows, common_width
from nearpeak.kernels.softmax import triton as softmax_triton
from nearpeak.kernels.softmax.triton import mask_layout
from nearpeak.kernels.softmax.tuning import TileConfig, candidates, choose_config, heuristic

assert_as_exact = functools.partial(kernel_checks.assert_as_exact, by_exp=True)
assert_kernel_is_exact = functools.partial(kernel_checks.assert_kernel_is_exact, by_exp=True)
BOTH = [(kernels.softmax, reference), (kernels.log_softmax, log_reference)]
NAMES = ["softmax", "log_softmax"]
VARIANTS = {
    "tile": TileConfig(rows=4, warps=4),
    "packed": TileConfig(rows=1, warps=4, packed=True),
    "whole": SplitConfig(part=2**20, steps=2, warps=1),
    "split": SplitConfig(part=704, steps=2, warps=1, kept=True),
    "kept whole": SplitConfig(part=2**20, steps=8, warps=1, kept=True),
    "split into more": SplitConfig(part=256, steps=1, warps=1, stages=2, hints=False),
}


@pytest.mark.parametrize("kernel", ["softmax", "softmax_backward"])
def test_few_rows_are_spread_over_all_multiprocessors(kernel):
    few, many = (
        choose_config(kernel, rows, 808, torch.empty(1, 1).half(), masked=False, config=None) for rows in (264, 10**6)
    )
    assert (few.rows, 256 * few.warps) == (1, 1024)
    assert many.rows == 2, "as measured"


@pytest.fixture(autouse=True)
def _kernels_alone():
    with kernels.using("require"):
        yield


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (9, 1), (5, 7), (2, 3, 129), (2, 0, 5), (3, 0), ()], ids=str)
def test_values_and_gradients(kernel, plain, dtype, shape):
    assert_kernel_is_exact(kernel, plain, [3 * random(*shape, dtype=dtype)])


@pytest.mark.slow
@pytest.mark.parametrize("log", [False, True], ids=NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_every_way_of_running(variant, log, masked):
    """Rows of several parts and chunks, with an end that is no multiple of anything."""
    config, dtype = VARIANTS[variant], torch.bfloat16
    x, gradient = random(1, 2, 1301, dtype=dtype), random(1, 2, 1301, dtype=dtype, seed=1)
    mask = (random(1, 1, 1301, seed=2) > 0) if masked else None
    plain = log_reference if log else reference
    options = {"scale": 0.7, "mask": mask, "causal": not masked}
    wide = x.double().requires_grad_()
    exact = plain(wide, **options)
    (exact_gradient,) = torch.autograd.grad(exact, wide, gradient.double())
    leaf = x.clone().requires_grad_()
    low = plain(leaf, **options)
    (low_gradient,) = torch.autograd.grad(low, leaf, gradient)
    forward = softmax_triton.log_forward if log else softmax_triton.forward
    backward = softmax_triton.log_backward if log else softmax_triton.backward
    result = forward(x, mask, 0.7, not masked, dtype, config=config)
    assert_as_exact(result, exact.detach(), low.detach(), "result")
    again = backward(gradient, result, 0.7, not masked, dtype, config=config)
    assert_as_exact(again, exact_gradient, low_gradient, "gradient")


@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
@pytest.mark.parametrize(
    "shape",
    [(6,), (3, 6), (4, 3, 6), (2, 4, 3, 6), (2, 1, 3, 6), (2, 1, 1, 6), (2, 1, 3, 1), (1, 4, 1, 6), ()],
    ids=str,
)
def test_masks_of_any_shape(kernel, plain, shape):
    x = random(2, 4, 3, 6)
    keep, bias = random(*shape) > -0.2, random(*shape)
    run, exact = (functools.partial(function, scale=0.5, mask=keep) for function in (kernel, plain))
    assert_kernel_is_exact(run, exact, [x])
    if shape[-1:] != (6,):  # adding the same to all keys changes nothing: there is no gradient to compare
        torch.testing.assert_close(kernel(x, mask=bias), plain(x, mask=bias))
        return
    run, exact = (lambda x, bias, run=run: run(x, scale=0.5, mask=bias) for run in (kernel, plain))
    assert_kernel_is_exact(run, exact, [x, bias])


def test_a_mask_is_passed_by_its_strides():
    x = torch.empty(2, 4, 3, 32, device=DEVICE)
    _, memory, place = mask_layout(torch.empty(2, 1, 3, 32, device=DEVICE), x)
    assert place == (12, 3, 96, 0, 32, 1)
    assert memory.untyped_storage().nbytes() == 2 * 3 * 32 * 4
    _, memory, place = mask_layout(torch.empty(32, 3, device=DEVICE).t().expand(2, 4, 3, 32), x)
    assert place == (24, 3, 0, 0, 32, 1)
    assert memory.untyped_storage().nbytes() == 3 * 32 * 4  # columns that are apart are copied, once
    x = torch.empty(2, 3, 2, 3, 2, 32, device=DEVICE)
    _, memory, place = mask_layout(torch.empty(2, 1, 2, 1, 2, 32, device=DEVICE), x)
    assert place[2:] == (0, 0, 32, 1)
    assert memory.numel() == x.numel()


@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
def test_a_mask_of_six_dimensions(kernel, plain):
    x, mask = random(2, 2, 2, 2, 2, 5), random(2, 1, 2, 1, 2, 5) > 0
    torch.testing.assert_close(kernel(x, mask=mask), plain(x, mask=mask))


@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
@pytest.mark.parametrize("shape", [(5, 5), (2, 3, 7), (2, 7, 3), (4, 1), (1, 4)], ids=str)
def test_causal(kernel, plain, shape):
    """Also more queries than keys, which leaves rows without any."""
    assert_kernel_is_exact(
        functools.partial(kernel, causal=True), functools.partial(plain, causal=True), [random(*shape)]
    )


@pytest.mark.parametrize("variant", ["tile", "whole", "split"])
def test_what_is_not_seen_is_not_looked_at(variant):
    hidden = torch.ones(2, 700, dtype=torch.bool, device=DEVICE).triu(699)
    x, gradient = random(2, 700), random(2, 700)
    result = softmax_triton.forward(x, None, 1.0, True, x.dtype, config=VARIANTS[variant])
    poisoned = x.masked_fill(hidden, float("nan"))
    assert torch.equal(softmax_triton.forward(poisoned, None, 1.0, True, x.dtype, config=VARIANTS[variant]), result)
    expected = softmax_triton.backward(gradient, result, 1.0, True, x.dtype, config=VARIANTS[variant])
    poisoned = gradient.masked_fill(hidden, float("nan"))
    actual = softmax_triton.backward(poisoned, result, 1.0, True, x.dtype, config=VARIANTS[variant])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("log", [False, True], ids=NAMES)
def test_a_row_without_any_key(variant, log):
    nothing = float("-inf") if log else 0.0
    mask = torch.tensor([[True], [False]], device=DEVICE)
    forward = softmax_triton.log_forward if log else softmax_triton.forward
    result = forward(random(2, 300), mask, 1.0, False, torch.float32, config=VARIANTS[variant])
    assert result[0].isfinite().all()
    assert torch.equal(result[1], torch.full_like(result[1], nothing))
    backward = softmax_triton.log_backward if log else softmax_triton.backward
    gradient = backward(torch.ones_like(result), result, 1.0, False, torch.float32, config=VARIANTS[variant])
    assert gradient[0].isfinite().all()
    assert not gradient[1].any()


@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
def test_infinities_and_what_is_not_a_number(kernel, plain):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [[0.0, 1.0, -inf], [-inf, -inf, -inf], [0.0, nan, 1.0], [inf, 0.0, 1.0], [-3.4e38, -3.4e38, -3.4e38]],
        device=DEVICE,
    )
    for function in (kernel, plain):
        result = function(x)
        assert torch.equal(result.isnan().all(-1).cpu(), torch.tensor([False, False, True, True, False]))
        torch.testing.assert_close(result[[0, 4]], getattr(torch, kernel.__name__)(x, -1)[[0, 4]])
        torch.testing.assert_close(function(x[:1], scale=-1.0)[0].isnan(), torch.ones(3, device=DEVICE).bool())


@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
def test_any_layout_of_input_and_gradient(kernel, plain):
    x, gradient = random(2, 3, 8), random(2, 3, 8, seed=1)
    expected = torch.autograd.grad(plain(leaf := x.clone().requires_grad_()), leaf, gradient)[0]
    ways = list(layouts(x))
    for index, (name, upstream) in enumerate(layouts(gradient)):
        other, values = ways[(index + 2) % len(ways)]
        leaf = values.detach().requires_grad_()
        result = kernel(leaf)
        torch.testing.assert_close(result, plain(x), msg=other)
        torch.testing.assert_close(torch.autograd.grad(result, leaf, upstream)[0], expected, msg=f"{other}, {name}")
    leaf = x[:1].expand(2, 3, 8).detach().requires_grad_()
    kernel(leaf)[..., 0].sum().backward()
    other = x[:1].expand(2, 3, 8).clone().requires_grad_()
    plain(other)[..., 0].sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(-4, 3),
    st.sampled_from([1.0, 0.3, -2.0, 0.0]),
    st.sampled_from([None, torch.bool, torch.float32]),
    st.booleans(),
    st.booleans(),
)
def test_any_shape_and_options(shape, dtype, dim, scale, kind, causal, log):
    dim = dim % len(shape) - len(shape)
    x = random(*shape, dtype=dtype)
    mask = None if kind is None else random(*[size if index % 2 else 1 for index, size in enumerate(shape)])
    mask = mask > 0 if kind == torch.bool else mask
    options = {"dim": dim, "scale": scale, "mask": mask, "causal": causal and dim == -1}
    kernel, plain = BOTH[log]
    upstream = random(*shape, dtype=dtype, seed=1)
    with kernels.using("require"):  # a fixture is of a test and not of its examples
        result, (moved,) = gradients(functools.partial(kernel, **options), [x], upstream)
    exact, (exact_moved,) = gradients(functools.partial(plain, **options), [x.double()], upstream)
    # a gradient may be a small difference of numbers near 1
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(result.double(), exact, **close)
    torch.testing.assert_close(moved.double(), exact_moved, **close)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_a_dtype_of_the_result(dtype, wanted):
    x = random(3, 40, dtype=dtype)
    run, exact = (
        lambda x, function=function: function(x, dtype=torch.float64 if x.dtype == torch.float64 else wanted)
        for function in (kernels.softmax, reference)
    )
    with kernels.using("auto"):  # float64 is the reference's
        assert_kernel_is_exact(run, exact, [x], random(3, 40, seed=1))
    assert kernels.softmax(x, dtype=wanted).dtype == wanted


def test_it_sums_to_one():
    result = kernels.softmax(10 * random(7, 333), scale=3.0)
    torch.testing.assert_close(result.sum(-1), torch.ones(7, device=DEVICE))
    assert (result >= 0).all()
    torch.testing.assert_close(kernels.log_softmax(random(7, 333)).exp().sum(-1), torch.ones(7, device=DEVICE))
    gradient = random(7, 333, seed=1)
    (moved,) = torch.autograd.grad(kernels.softmax(leaf := random(7, 333).requires_grad_()), leaf, gradient)
    torch.testing.assert_close(moved.sum(-1), torch.zeros(7, device=DEVICE), atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", ["tile", "whole", "split"])
def test_rows_farther_apart_than_32_bits_reach(variant):
    """Memory that is never touched costs nothing, and the interpreter's 32 bits overflow as a GPU's do."""
    step = 2**29 + 16
    memory = torch.empty(4 * step + 600, dtype=torch.bfloat16, device=DEVICE)
    x = memory.as_strided((5, 600), (step, 1))
    x.copy_(random(5, 600))
    near = x.contiguous()
    config = VARIANTS[variant]
    run = functools.partial(softmax_triton.forward, scale=1.0, causal=False, dtype=torch.float32, config=config)
    assert torch.equal(run(x, x), run(near, near))  # as a mask too
    back = functools.partial(softmax_triton.backward, scale=1.0, causal=False, dtype=torch.float32, config=config)
    assert torch.equal(back(x, x), back(near, near))


def test_rows_without_a_copy():
    x = random(4, 6, 8)
    views = [x, x[:, 0], x[:, :, :5], x[:1, :1].expand(4, 6, 8), x[0, 0], x[0, 0, 0], x[:, :, :1]]
    copies = [x[:, :3], x[:1].expand(4, 6, 8), x.transpose(0, 1), x[..., ::2], x[..., :1].expand(4, 6, 8)]
    for view in views + copies:
        rows = as_rows(view)
        assert rows.shape == (view[..., 0].numel() if view.dim() else 1, view.shape[-1] if view.dim() else 1)
        assert torch.equal(rows.reshape(-1), view.reshape(-1))
        assert (rows.data_ptr() == x.data_ptr()) is any(view is one for one in views)
    assert as_rows(x[0].t()).stride() == (6, 1)
    assert as_rows(torch.empty(0, 3, 0)).shape == (0, 0)
    assert [common_width(*numbers) for numbers in [(4096,), (24, 8), (7, 16), (0, 12)]] == [16, 8, 1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_operators_are_torchs(name):
    x = random(2, 3, 5).requires_grad_()
    forward = getattr(torch.ops.nearpeak, name).default
    backward = getattr(torch.ops.nearpeak, f"{name}_backward").default
    opcheck(forward, (x, random(3, 5) > 0, 0.5, False, torch.float32))
    opcheck(forward, (x, random(5).requires_grad_(), 0.5, True, torch.bfloat16))
    opcheck(backward, (random(2, 3, 5), getattr(torch, name)(x.detach(), -1), 0.5, False, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "plain"), BOTH, ids=NAMES)
def test_it_compiles_without_a_graph_break(kernel, plain):
    x, bias = random(3, 5).requires_grad_(), random(5).requires_grad_()
    weights = torch.arange(5.0, device=DEVICE)

    def loss(function, x, bias):
        return (function(x.sin(), scale=0.5, mask=bias, causal=False) * weights).sum()

    compiled = torch.compile(functools.partial(loss, kernel), fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x, bias), (x, bias))
    for one, other in zip(actual, torch.autograd.grad(loss(plain, x, bias), (x, bias)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("plain", [reference, log_reference], ids=NAMES)
def test_the_reference_is_differentiable_twice(plain):
    x = random(4, 3).double().requires_grad_()
    keep = torch.tensor([[True, True, False]] * 3 + [[False] * 3], device=DEVICE)
    bias = random(3).double().requires_grad_()

    def finite(x, bias):
        return plain(x, scale=0.7, mask=bias)

    def visible_scores(x):
        return plain(x, scale=0.7, mask=keep).masked_fill(~keep, 0.0)

    assert torch.autograd.gradcheck(finite, (x, bias))
    assert torch.autograd.gradcheck(visible_scores, x)
    assert torch.autograd.gradgradcheck(finite, (x, bias))


def test_what_cannot_be_asked():
    x = random(2, 3)
    for mode in ("require", "off"):
        with kernels.using(mode):
            with pytest.raises(IndexError, match="out of range"):
                kernels.softmax(x, 2)
            with pytest.raises(IndexError, match="out of range"):
                kernels.softmax(x[0], -2)
            with pytest.raises(UsageError, match=r"broadcast to x, of shape \[2, 3\].*\[4\]"):
                kernels.softmax(x, mask=random(4))
            with pytest.raises(UsageError, match=r"broadcast to x"):
                kernels.softmax(x, mask=random(1, 2, 3))
            with pytest.raises(UsageError, match=r"boolean.*int64.*mask != 0"):
                kernels.softmax(x, mask=torch.ones(3, dtype=torch.int64, device=DEVICE))
            with pytest.raises(UsageError, match=r"queries, keys.*dim=0"):
                kernels.softmax(x, 0, causal=True)
            with pytest.raises(UsageError, match=r"queries, keys"):
                kernels.softmax(x[0], causal=True)
    with kernels.using("auto"), pytest.raises(UsageError, match=r"of floats.*int64"):
        kernels.log_softmax(torch.ones(3, dtype=torch.int64, device=DEVICE))
    assert "float64" in kernels.supports(kernels.softmax, x, dtype=torch.float64).reason


def test_configurations():
    x = torch.empty(1, 1, dtype=torch.bfloat16, device=DEVICE)
    for columns in (1, 1024, 4096, 16384, 65536, 262144):
        for backward in (False, True):
            configs = candidates(columns, backward=backward)
            assert columns == 1 or 8 <= len(configs) <= 40
            assert heuristic(columns, backward=backward).warps <= 32
    tile = VARIANTS["tile"]
    assert choose_config("softmax", 9, 65536, x, masked=False, config=tile).packed
    assert choose_config("softmax", 9, 65536, x, masked=True, config=tile) == SplitConfig()
    assert choose_config("softmax", 9, 65536, x.float(), masked=False, config=tile) == SplitConfig()
    assert choose_config("softmax_backward", 9, 32768, x, masked=False, config=tile).packed
    many, few = (choose_config("softmax_backward", rows, 9344, x, masked=False, config=None) for rows in (9999, 46))
    assert (many.packed, few.packed) == (True, False), "threads with few elements have the registers for them"
    assert few.warps > many.warps


@pytest.mark.gpu
@pytest.mark.parametrize("log", [False, True], ids=NAMES)
@pytest.mark.parametrize("shape", [(512, 4096), (256, 50257), (64, 65536), (200, 262144), (8, 262144)], ids=str)
def test_full_size(shape, log):
    kernel, plain = BOTH[log]
    assert_kernel_is_exact(kernel, plain, [random(*shape, dtype=torch.bfloat16)])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 4096), (256, 65536), (64, 262144)], ids=str)
def test_again_and_again(shape):
    x, gradient = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16, seed=1)
    first = softmax_triton.forward(x, None, 1.0, False, x.dtype)
    back = softmax_triton.backward(gradient, first, 1.0, False, x.dtype)
    for _ in range(100):
        assert torch.equal(softmax_triton.forward(x, None, 1.0, False, x.dtype), first)
        assert torch.equal(softmax_triton.backward(gradient, first, 1.0, False, x.dtype), back)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 4096, 16384, 65536, 262144])
def test_every_candidate(columns):
    x, gradient = random(70, columns, dtype=torch.bfloat16), random(70, columns, dtype=torch.bfloat16, seed=1)
    expected = torch.softmax(x, -1)
    moved = torch.softmax(leaf := x.double().requires_grad_(), -1)
    (expected_gradient,) = torch.autograd.grad(moved, leaf, gradient.double())
    for config in candidates(columns):
        result = softmax_triton.forward(x, None, 1.0, False, x.dtype, config=config)
        assert_as_exact(result, moved.detach(), expected, str(config))
    for config in candidates(columns, backward=True):
        result = softmax_triton.backward(gradient, expected, 1.0, False, x.dtype, config=config)
        assert_as_exact(result, expected_gradient, expected_gradient.to(x.dtype), str(config))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1024), (16, 262144)], ids=str)
def test_in_a_graph(shape):
    x = random(*shape, dtype=torch.bfloat16)
    kernels.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.softmax(x)
    x.copy_(random(*shape, seed=1))
    graph.replay()
    assert torch.equal(result, kernels.softmax(x))


@pytest.mark.gpu
def test_compiled_by_inductor():
    x = random(64, 1000, dtype=torch.bfloat16).requires_grad_()
    compiled = torch.compile(lambda x: kernels.log_softmax(x * 2, scale=0.5)[:, 3].sum(), fullgraph=True)
    (actual,) = torch.autograd.grad(compiled(x), x)
    (expected,) = torch.autograd.grad(torch.log_softmax(x.float(), -1)[:, 3].sum(), x)
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-2)
