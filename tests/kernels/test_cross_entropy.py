"""`cross_entropy` against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import UsageError

pytest.importorskip("triton")
REDUCTIONS = ("mean", "sum", "none")
OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "weighted": {"weight": True},
    "smooth and weighted": {"label_smoothing": 0.2, "weight": True},
    "softcap and z": {"softcap": 4.0, "z_loss": 1e-2},
    "all": {"label_smoothing": 0.1, "weight": True, "softcap": 3.0, "z_loss": 1e-3},
}


def made(shape, dtype=torch.float32, ignored=True):
    torch.manual_seed(0)
    logits = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    target = torch.randint(0, shape[-1], shape[:-1], device=DEVICE)
    if ignored and target.numel() > 1:
        target.view(-1)[1] = -100
    return logits, target


def with_weight(options, columns):
    if not options.get("weight"):
        return dict(options)
    return {**options, "weight": torch.linspace(0.1, 2.0, columns, device=DEVICE)}


def assert_exact(logits, target, upstream=None, **options):
    with kernels.using("require"):
        assert_kernel_is_exact(
            lambda x: kernels.cross_entropy(x, target, **options),
            lambda x: kernels.cross_entropy.reference(x, target, **options),
            [logits],
            upstream,
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients(options, dtype):
    for shape, reductions in (((5, 7), REDUCTIONS), ((2, 4103), ("mean",))):
        for reduction in reductions:
            logits, target = made(shape, dtype)
            assert_exact(logits, target, reduction=reduction, **with_weight(OPTIONS[options], shape[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 1), (33, 2), (2, 3, 16), (2, 1, 2, 3, 5), (6,), (2, 4096), (1, 50257)], ids=str
)
def test_shapes(shape):
    logits, target = made(shape, torch.bfloat16)
    assert_exact(logits, target)
    assert_exact(logits, target, reduction="none")


def test_it_is_torchs():
    logits, target = made((6, 9))
    for reduction in REDUCTIONS:
        for weight in (None, torch.rand(9, device=DEVICE)):
            options = {"reduction": reduction, "weight": weight, "label_smoothing": 0.1}
            expected = torch.nn.functional.cross_entropy(logits, target, **options)
            torch.testing.assert_close(kernels.cross_entropy(logits, target, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [12, 4104])
def test_layouts_of_logits_and_upstream_gradients(columns):
    logits, target = made((2, 3, columns))
    other = torch.randn(2, 3, device=DEVICE)
    ways = [*(one for _, one in layouts(other)), other[:1, :1].expand(2, 3)]
    exact = [
        torch.autograd.grad(loss_of(wide := logits.double().requires_grad_(), target), wide, way.double())
        for way in ways
    ]
    for _, x in layouts(logits):
        x = x.detach().requires_grad_()
        loss = kernels.cross_entropy(x, target, reduction="none")
        for way, (expected,) in zip(ways, exact, strict=True):
            (actual,) = torch.autograd.grad(loss, x, way, retain_graph=True)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)
            if columns > 12:
                break
        x.grad = None
        kernels.cross_entropy(x, target, reduction="sum").backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(loss.sum(), x)[0])


def loss_of(logits, target):
    return kernels.cross_entropy.reference(logits, target, reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [16, 4112, 4099])
def test_logits_but_for_the_last_of_each_sequence_are_not_copied(columns):
    from nearpeak.kernels.losses import triton as losses_triton

    logits, target = made((3, 4, columns), torch.bfloat16)
    part, wanted = logits[:, :-1], target[:, 1:]
    assert losses_triton.logit_rows(part).tensor is part
    assert_exact(part, wanted)
    assert_exact(part, wanted, reduction="none")


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(2, 40), st.sampled_from(DTYPES),
    st.sampled_from(REDUCTIONS), st.sampled_from([0.0, 0.3]), st.sampled_from([None, 2.0]),
    st.sampled_from([0.0, 0.01]), st.booleans(), st.integers(-3, 3), st.integers(0, 4),
)  # fmt: skip
def test_any_of_it(shape, columns, dtype, reduction, smoothing, softcap, z_loss, weighted, ignore_index, layout):
    logits, target = made((*shape, columns), dtype, ignored=False)
    target.view(-1)[0] = ignore_index if ignore_index < columns else 0
    ways = list(layouts(logits))
    options = with_weight({"weight": weighted}, columns)
    options.update(reduction=reduction, label_smoothing=smoothing, softcap=softcap, z_loss=z_loss)
    options["weight"] = options["weight"] if weighted else None
    assert_exact(ways[layout % len(ways)][1], target, ignore_index=ignore_index, **options)


@pytest.mark.parametrize(
    "config", [("LongRowConfig", {"repeats": 2, "warps": 1}), ("WholeRowConfig", {"rows": 4, "warps": 4})], ids=str
)
@pytest.mark.parametrize("columns", [1, 13, 512, 1025, 1600])
def test_both_kernels_at_the_edges_of_blocks(columns, config):
    from nearpeak.kernels.losses import triton as losses_triton

    name, sizes = config
    config = getattr(losses_triton, name)(**sizes)
    for options in ((0.0, 0.0, 0.0), (0.1, 5.0, 0.01)):
        logits, target = made((3, columns), torch.bfloat16)
        target[2] = columns - 1
        loss, gradient, statistics, _ = losses_triton.cross_entropy_forward(
            logits, target, None, -100, *options, "sum", True, config=config
        )
        names = dict(zip(("label_smoothing", "softcap", "z_loss"), options, strict=True))
        names["softcap"] = names["softcap"] or None
        wide = logits.double().requires_grad_()
        exact = kernels.cross_entropy.reference(wide, target, reduction="sum", **names)
        torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-5, atol=1e-5)
        (expected,) = torch.autograd.grad(exact, wide)
        torch.testing.assert_close(gradient.double(), expected, rtol=2**-8, atol=1e-6)
        rest = logits[[0, 2]].double()
        rest = rest if not options[1] else options[1] * torch.tanh(rest / options[1])
        found = (statistics[0] + statistics[1].log())[[0, 2]]
        torch.testing.assert_close(found.double(), rest.logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_one_class_has_no_gradient():
    """Exactly 0, beside which no error is small: it is held against the weight instead."""
    logits, target = made((4, 1))
    logits.requires_grad_()
    options = with_weight({"weight": True}, 1)
    kernels.cross_entropy(logits, target, label_smoothing=0.3, reduction="sum", **options).backward()
    assert logits.grad.abs().max() <= 2**-23 * options["weight"].item()


def test_a_gradient_sums_to_zero_over_classes():
    logits, target = made((4, 300))
    logits.requires_grad_()
    kernels.cross_entropy(logits, target, label_smoothing=0.1).backward()
    assert logits.grad.sum(-1).abs().max() < 1e-6
    assert torch.equal(logits.grad[1], torch.zeros(300, device=DEVICE))


def test_logits_far_from_zero_lose_nothing():
    logits, target = made((4, 4200))
    assert_exact(logits + 1024.0, target, label_smoothing=0.1)


@pytest.mark.parametrize("columns", [8, 4200])
def test_logits_that_are_infinite(columns):
    logits, target = made((4, columns))
    logits[0, 2:5] = float("-inf")
    target[0] = 1
    target[2], logits[2, 3] = 3, float("-inf")
    logits[3] = torch.finfo(torch.float32).min
    for reduction in ("none", "sum"):
        x, y = (logits.clone().requires_grad_() for _ in range(2))
        actual = kernels.cross_entropy(x, target, reduction=reduction)
        expected = torch.nn.functional.cross_entropy(y, target, reduction=reduction)
        torch.testing.assert_close(actual, expected, equal_nan=True)
        actual[0].backward() if reduction == "none" else actual.backward()
        expected[0].backward() if reduction == "none" else expected.backward()
        torch.testing.assert_close(x.grad[[0, 1, 3]], y.grad[[0, 1, 3]])


@pytest.mark.parametrize("columns", [8, 4200])
def test_not_a_number_is_seen_unless_it_is_ignored(columns):
    logits, target = made((3, columns))
    logits[:2, 3] = float("nan")
    logits.requires_grad_()
    losses = kernels.cross_entropy(logits, target, reduction="none")
    assert losses.isnan().tolist() == [True, False, False]
    losses.sum().backward()
    assert logits.grad.isnan().any(-1).tolist() == [True, False, False]


@pytest.mark.parametrize("columns", [8, 4200])
def test_targets_out_of_range_are_not_read(columns):
    logits, target = made((4, columns), ignored=False)
    target[0], target[2] = columns, -1
    logits.requires_grad_()
    losses = kernels.cross_entropy(logits, target, reduction="none", weight=torch.ones(columns, device=DEVICE))
    assert losses.isnan().tolist() == [True, False, True, False]
    losses.sum().backward()
    assert logits.grad.isnan().all(-1).tolist() == [True, False, True, False]
    if DEVICE == "cpu":
        with kernels.using("off"), pytest.raises(IndexError, match="out of bounds"):
            kernels.cross_entropy(logits, target)


def test_all_ignored_and_no_rows():
    logits = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    target = torch.full((3,), -100, device=DEVICE)
    loss = kernels.cross_entropy(logits, target)
    assert loss.isnan()
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert kernels.cross_entropy(logits, target, reduction="sum") == 0
    for reduction in REDUCTIONS:
        empty = torch.empty(0, 5, device=DEVICE, requires_grad=True)
        loss = kernels.cross_entropy(empty, target[:0], reduction=reduction)
        torch.testing.assert_close(
            loss, torch.nn.functional.cross_entropy(empty, target[:0], reduction=reduction), equal_nan=True
        )
        loss.sum().backward()
        assert empty.grad.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16], ids=str)
def test_targets_of_other_integers(dtype):
    logits, target = made((4, 9), ignored=False)
    assert_exact(logits, target.to(dtype))
    assert_exact(logits, torch.stack([target, target], -1)[..., 0].to(dtype))


def test_the_logsumexp():
    logits, target = made((2, 3, 50))
    for on in ("require", "off"):
        with kernels.using(on):
            loss, lse = kernels.cross_entropy(logits.requires_grad_(), target, return_lse=True)
        expected = logits.detach().logsumexp(-1)
        expected[0, 1] = 0.0
        torch.testing.assert_close(lse, expected)
        assert loss.requires_grad
        assert not lse.requires_grad


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_pass_multiplies_once(reduction, dtype, inplace):
    logits, target = made((4, 9), dtype)
    leaf = logits.clone().requires_grad_()
    loss = kernels.cross_entropy(leaf * 1, target, reduction=reduction, inplace=inplace)
    below = torch.nn.functional.cross_entropy(expected := logits.float().requires_grad_(), target, reduction=reduction)
    (exact,) = torch.autograd.grad(below.sum(), expected)
    for factor, kept in ((3.0, True), (0.0, True), (1.0, True), (0.5, False)):
        (actual,) = torch.autograd.grad(loss.sum(), leaf, torch.tensor(factor, device=DEVICE), retain_graph=kept)
        torch.testing.assert_close(actual.float(), factor * exact, rtol=2e-3, atol=1e-4)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss.sum(), leaf)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [16, 4099])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_place(dtype, columns):
    for reduction in REDUCTIONS:
        logits, target = made((3, columns), dtype)
        leaf = logits.clone().requires_grad_()
        seen = []
        between = leaf * 1
        between.register_hook(lambda gradient, seen=seen: seen.append(gradient.data_ptr()))
        where = between.data_ptr()
        loss = kernels.cross_entropy(between, target, reduction=reduction, inplace=True)
        other = logits.clone().requires_grad_()
        expected = kernels.cross_entropy(other, target, reduction=reduction)
        assert torch.equal(loss, expected)
        upstream = torch.full_like(loss, 2.0)
        loss.backward(upstream)
        expected.backward(upstream)
        assert torch.equal(leaf.grad, other.grad)
        assert seen == [where]


def test_in_place_on_what_cannot_be_addressed_or_has_other_uses():
    logits, target = made((3, 4, 10))
    leaf = logits.clone().requires_grad_()
    exact = torch.autograd.grad(kernels.cross_entropy(leaf, target), leaf)[0]
    for layout in (leaf.transpose(0, 2).contiguous().transpose(0, 2), torch.cat([leaf, leaf], -1)[..., :10]):
        (actual,) = torch.autograd.grad(kernels.cross_entropy(layout, target, inplace=True), leaf)
        torch.testing.assert_close(actual, exact)
    kept = leaf.exp()  # needs its result for its own gradient
    loss = kernels.cross_entropy(kept, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(UsageError, match="leaf"):
        kernels.cross_entropy(leaf, target, inplace=True)
    with pytest.raises(UsageError, match="expanded"):
        kernels.cross_entropy((leaf[:1] * 1).expand(3, 4, 10), target, inplace=True)
    plain = logits.clone()
    kernels.cross_entropy(plain, target, inplace=True)
    assert torch.equal(plain, logits)


def test_a_gradient_of_one_costs_no_pass(monkeypatch):
    """Nothing is written where the gradient from above is 1, and no copy is made."""
    from nearpeak.kernels.losses import triton as losses_triton

    x = torch.randn(100, device=DEVICE)
    before = x.clone()
    x[0] = float("nan")  # 1 times a NaN of these bits would be another NaN
    bits = x.view(torch.int32).clone()
    losses_triton.scale_gradient_(x, torch.ones((), device=DEVICE))
    assert torch.equal(x.view(torch.int32), bits)
    losses_triton.scale_gradient_(x, torch.tensor(3.0, device=DEVICE))
    assert torch.equal(x[1:], 3 * before[1:])


@pytest.mark.slow
def test_operators_are_those_of_torch():
    operators = torch.ops.nearpeak
    logits, target = made((3, 5))
    weight = torch.rand(5, device=DEVICE)
    for reduction, ahead in (("mean", True), ("none", False)):
        rest = (-100, 0.1, 2.0, 0.01, reduction)
        opcheck(operators.cross_entropy.default, (logits.clone().requires_grad_(), target, weight, *rest, ahead))
        _, _, statistics, parts = operators.cross_entropy(logits, target, weight, *rest, False)
        upstream = torch.ones(3 if reduction == "none" else (), device=DEVICE)
        tensors = (upstream, logits, target, weight, statistics, parts)
        opcheck(operators.cross_entropy_backward.default, (*tensors, *rest))
    opcheck(operators.cross_entropy_.default, (logits.clone(), target, None, *rest))
    opcheck(operators.cross_entropy_backward_.default, (upstream, logits.clone(), target, None, *tensors[4:], *rest))
    opcheck(operators.scale_gradient_.default, (logits.clone(), torch.tensor(2.0, device=DEVICE)))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_operators_in_plain_torch(reduction):
    from nearpeak.kernels import losses as plain

    logits, target = made((2, 3, 8))
    target[0, 0] = 8  # out of range
    weight = torch.rand(8, device=DEVICE)
    rest = (-100, 0.1, 2.0, 0.01, reduction)
    for actual, expected in zip(
        plain.forward_reference(logits, target, weight, *rest, True),
        plain.cross_entropy_forward(logits, target, weight, *rest, True),
        strict=True,
    ):
        if actual.shape != (plain.PARTS,):
            torch.testing.assert_close(actual, expected, equal_nan=True)
        else:
            torch.testing.assert_close(actual.sum(), expected.sum())


@pytest.mark.slow
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_it_compiles_without_a_graph_break(reduction, inplace):
    logits, target = made((3, 8))
    x, y = (logits.clone().requires_grad_() for _ in range(2))

    def loss(x):
        return kernels.cross_entropy(2 * x, target, reduction=reduction, inplace=inplace).sum() * 3

    (actual,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    (expected,) = torch.autograd.grad(loss(y), y)
    torch.testing.assert_close(actual, expected)


def test_it_is_deterministic_and_seen_by_a_profiler():
    logits, target = made((5, 4200), torch.bfloat16)
    results = []
    for _ in range(2):
        x = logits.clone().requires_grad_()
        kernels.cross_entropy(x, target).backward()
        results.append(x.grad)
    x = logits.clone().requires_grad_()
    with torch.profiler.profile() as profiler:
        kernels.cross_entropy(x, target).backward()
    results.append(x.grad)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert {"nearpeak::cross_entropy", "nearpeak::scale_gradient_"} <= {event.name for event in profiler.events()}


def test_rows_further_apart_than_32_bits_count():
    columns, stride = 16, 2**30 + 16
    memory = torch.empty(2 * stride + columns, dtype=torch.bfloat16, device=DEVICE)  # only what is used is taken
    far = memory.as_strided((3, columns), (stride, 1))
    logits, target = made((3, columns), torch.bfloat16)
    far.copy_(logits)
    assert_exact(far, target)
    assert_exact(far, target, reduction="none")
    x = torch.nn.Parameter(far).view_as(far)
    kernels.cross_entropy(x, target, inplace=True)
    expected = torch.autograd.grad(kernels.cross_entropy(leaf := logits.requires_grad_(), target), leaf)[0]
    assert torch.equal(x.detach(), expected)


def test_a_second_derivative_is_refused_and_the_reference_has_it():
    logits, target = made((2, 5))
    logits.requires_grad_()
    for inplace in (False, True):
        with pytest.raises(RuntimeError, match=r"no second derivative.*using\('off'\)"):
            torch.autograd.grad(kernels.cross_entropy(logits * 1, target, inplace=inplace), logits, create_graph=True)
    wide = logits.detach().double().requires_grad_()

    def loss(x):
        return kernels.cross_entropy(x, target, label_smoothing=0.1, softcap=3.0, z_loss=0.01)

    assert not kernels.supports(kernels.cross_entropy, wide, target)
    assert torch.autograd.gradcheck(loss, wide)
    assert torch.autograd.gradgradcheck(loss, wide)


def test_what_has_no_meaning_is_said():
    logits, target = made((2, 5))
    wrong = [
        ({"reduction": "means"}, "Did you mean 'mean'"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"softcap": 0.0}, "above 0"),
        ({"weight": torch.ones(4, device=DEVICE)}, r"shape \(5,\), and have \(4,\)"),
    ]
    for mode in ("auto", "off"):
        with kernels.using(mode):
            for options, said in wrong:
                with pytest.raises(UsageError, match=said):
                    kernels.cross_entropy(logits, target, **options)
            with pytest.raises(UsageError, match=r"shape \(2,\), one per row, and have \(1,\)"):
                kernels.cross_entropy(logits, target[:1])
            with pytest.raises(UsageError, match="tensor of float32"):
                kernels.cross_entropy(logits, target.float())


def test_the_module():
    logits, target = made((4, 6))
    weight = torch.rand(6, device=DEVICE)
    module = kernels.CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=0.01, softcap=5.0)
    expected = kernels.cross_entropy(logits, target, weight=weight, label_smoothing=0.1, z_loss=0.01, softcap=5.0)
    assert torch.equal(module(logits, target), expected)
    assert list(module.state_dict()) == ["weight"]


def test_candidates_are_right_too():
    from nearpeak.kernels.losses import triton as losses_triton

    for columns in (256, 4096, 32768, 128256):
        assert 4 <= len(losses_triton.cross_entropy_candidates(columns)) <= 40
    logits, target = made((3, 256), torch.bfloat16)
    for config in losses_triton.cross_entropy_candidates(256)[::4]:
        loss, gradient, _, _ = losses_triton.cross_entropy_forward(
            logits, target, None, -100, 0.0, 0.0, 0.0, "mean", True, config=config
        )
        wide = logits.double().requires_grad_()
        torch.nn.functional.cross_entropy(wide, target).backward()
        assert_as_exact(gradient, wide.grad, wide.grad.bfloat16())
        del loss


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [256, 4096, 32000, 50257, 128256, 262144])
def test_large_logits(columns):
    torch.manual_seed(0)
    rows = 2**28 // columns
    logits = (2 * torch.randn(rows, columns, device="cuda")).bfloat16()
    target = torch.randint(0, columns, (rows,), device="cuda")
    target[::7] = -100
    x, y = logits.clone().requires_grad_(), logits.float().requires_grad_()
    loss = kernels.cross_entropy(x, target)
    expected = torch.nn.functional.cross_entropy(y, target)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    assert_as_exact(x.grad, y.grad, y.grad.bfloat16())


@pytest.mark.gpu
def test_a_hundred_launches_give_the_same_bits():
    logits, target = made((512, 128256), torch.bfloat16)
    first = None
    for _ in range(100):
        x = logits.detach().requires_grad_()
        loss = kernels.cross_entropy(x, target)
        (gradient,) = torch.autograd.grad(loss, x)
        first = first or (loss.detach(), gradient)
        assert torch.equal(loss, first[0])
        assert torch.equal(gradient, first[1])


@pytest.mark.gpu
def test_in_place_takes_no_memory():
    logits, target = made((1024, 128256), torch.bfloat16)
    x = logits.requires_grad_() * 1
    kernels.cross_entropy((logits[:2] * 1), target[:2], inplace=True).backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = kernels.cross_entropy(x, target, inplace=True)
    torch.autograd.grad(loss, x)
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.gpu
def test_in_a_cuda_graph():
    logits, target = made((64, 32000), torch.bfloat16)
    x = logits.requires_grad_()

    def step():
        loss = kernels.cross_entropy(x, target)
        # a loss with its graph would keep the node of x, which belongs to the stream of its first use
        return loss.detach(), *torch.autograd.grad(loss, x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient = step()
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    expected = step()
    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])


@pytest.mark.gpu
def test_compiled_with_inductor():
    logits, target = made((64, 32000), torch.bfloat16)
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    compiled = torch.compile(lambda x: kernels.cross_entropy(x * 2, target, z_loss=1e-4), fullgraph=True)
    compiled(x).backward()
    kernels.cross_entropy(y * 2, target, z_loss=1e-4).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=2**-7, atol=1e-6)
