"""Traces of torch.func, of compiled code, of control flow and of flex attention."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as torch_map
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.trace import known_values
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, from its compiler
H200 = target_of(nearpeak.machine("h200-sxm"))
BOTH = pytest.mark.parametrize("target", [None, H200], ids=["here", "h200"])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def hidden(model: nn.Module):
    """The loss of a model that a trace cannot find among the variables: it meets it inside of the transform."""
    holder = [[[[[model]]]]]

    def loss(parameters, x, y):
        output = functional_call(holder[0][0][0][0][0], parameters, (x,))
        return nn.functional.cross_entropy(output, y)

    return loss


def names(recorded) -> list[str]:
    return [op.name.removeprefix("aten.") for op in recorded.ops]


def parameters_in(recorded) -> dict[str, float]:
    return {storage.name: storage.bytes for storage in recorded.storages.values() if storage.kind == "parameter"}


@BOTH
@pytest.mark.parametrize("per_sample", [False, True], ids=["whole", "per sample"])
def test_gradients_of_a_functional_call(target, per_sample):
    model = network()
    own = dict(model.named_parameters())
    loss = hidden(model)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    if per_sample:
        function = vmap(grad(lambda p, a, b: loss(p, a[None], b[None])), in_dims=(None, 0, 0))
    else:
        function = grad(loss)
    recorded = trace(lambda: function({name: value.detach() for name, value in own.items()}, x, y), target=target)
    assert names(recorded).count("gelu_backward.default") == 1
    assert {name.rpartition("Sequential.")[2] for name in parameters_in(recorded)} == set(own)
    products = [op for op in recorded.ops if op.packet in ("aten.mm", "aten.bmm", "aten.addmm")]
    assert len(products) == 5  # two layers forward, both weights and the hidden activation backward
    gradients = {recorded.storages[number].bytes for number in recorded.results}
    samples = 5 if per_sample else 1
    assert {4.0 * samples * value.numel() for value in own.values()} <= gradients
    assert dict(model.named_parameters()).keys() == own.keys()
    assert all(getattr(model.get_submodule(n[0]), n[2:]) is value for n, value in own.items())  # and not a wrapper


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda f, x: grad_and_value(lambda a: f(a).sum())(x), 4),
        (lambda f, x: vmap(f)(x), 2),
        (lambda f, x: vjp(f, x)[1](torch.ones(5, 3)), 4),
        (lambda f, x: jvp(f, (x,), (torch.ones_like(x),)), 4),
        (lambda f, x: jacrev(f)(x), 4),
        (lambda f, x: jacfwd(f)(x), 4),
        (lambda f, x: hessian(lambda a: f(a).sum())(x), 8),
    ],
    ids=["grad_and_value", "vmap", "vjp", "jvp", "jacrev", "jacfwd", "hessian"],
)
def test_every_transform(target, function, products):
    model = network()
    holder = [[[[[model]]]]]
    recorded = trace(lambda: function(lambda a: holder[0][0][0][0][0](a), torch.randn(5, 4)), target=target)
    counted = [name for name in names(recorded) if name.startswith(("mm", "addmm", "bmm", "baddbmm"))]
    assert len(counted) >= products
    assert set(parameters_in(recorded)) == {
        f"Sequential.{name}" for name, _ in model.named_parameters() if not name.endswith("bias")
    } | {name for name in parameters_in(recorded) if name.endswith("bias")}
    assert all(not torch._C._functorch.is_functorch_wrapped_tensor(value) for value in model.parameters())


@BOTH
def test_compiled_code_runs_uncompiled(target):
    weight = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(lambda a: torch.sin(a @ weight), fullgraph=True)
    recorded = trace(lambda x: compiled(x).sum().backward(), torch.randn(8, 4), target=target)
    assert names(recorded)[:2] == ["mm.default", "sin.default"]
    assert "cos.default" in names(recorded)
    assert any("uncompiled" in note for note in recorded.notes)
    assert weight.grad is None


@pytest.mark.slow
def test_a_compiled_module_keeps_its_names():
    model = torch.compile(network())
    recorded = trace(model, torch.randn(2, 4))  # without torch's warning of hooks
    assert set(parameters_in(recorded)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [op.module for op in recorded.ops if op.name == "aten.addmm.default"] == ["0", "2"]
    assert any("uncompiled" in note for note in recorded.notes)
    in_place = network()
    in_place.compile()
    assert "addmm.default" in names(trace(in_place, torch.randn(2, 4)))


def test_compilation_works_again_afterwards():
    trace(torch.compile(torch.sin), torch.randn(2))
    seen = []

    def backend(graph, _inputs):
        seen.append(graph)
        return graph.forward

    torch.compile(lambda a: a + 1, backend=backend)(torch.randn(3))
    assert len(seen) == 1
    assert trace(torch.sin, torch.randn(2)).notes == ()


def test_cond():
    x = torch.randn(4, requires_grad=True)
    recorded = trace(lambda: torch.cond(x.shape[0] > 2, lambda a: a.sin(), lambda a: a.cos(), (x,)))
    assert names(recorded) == ["sin.default"]
    known = torch.tensor(False)
    recorded = trace(lambda: torch.cond(known, lambda a: a.sin(), lambda a: a.cos(), (x,)).sum().backward())
    assert "cos.default" in names(recorded)
    assert "neg.default" in names(recorded)  # the gradient of the branch
    recorded = trace(lambda: torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)))
    assert "assumed: test_transforms.py:" in recorded.notes[0]


def test_cond_live():
    x = torch.ones(4)
    recorded = trace(lambda: torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)), live=True)
    assert "sin.default" in names(recorded)
    assert "cos.default" not in names(recorded)


@pytest.mark.slow
def test_while_loop(monkeypatch):
    monkeypatch.setattr(known_values, "MAX_READS", 20)
    x = torch.randn(4)

    def loop():
        return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), x))

    assert names(trace(loop)).count("sin.default") == 3
    large = torch.empty(400, 400)
    assert "sin.default" not in names(trace(lambda: while_loop(lambda a: a.sum() < 3, lambda a: (a.sin(),), (large,))))
    with pytest.raises(UsageError, match=r"test_transforms.py:\d+: this condition was assumed"):
        trace(lambda: while_loop(lambda a: (a == 3).all(), lambda a: (a.sin(),), (large,)))


def test_scan_and_map():
    x = torch.randn(6, 4)
    w = torch.randn(4, requires_grad=True)
    recorded = trace(lambda: scan(lambda c, a: (c + a, c * a), torch.zeros(4), x))
    assert names(recorded).count("mul.Tensor") == 6
    assert names(recorded)[-1] == "stack.default"
    recorded = trace(lambda: torch_map(lambda a, b: a * b, x, w).sum().backward())
    assert names(recorded).count("mul.Tensor") == 12  # one of the two gradients is wanted
    assert "add.Tensor" in names(trace(lambda: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4, requires_grad=True)
    recorded = trace(lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward())
    assert names(recorded).count("addmm.default") == 2


def test_selective_checkpoints():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def policy(_context, operator, *_args, **_kwargs):
        kept = operator == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x = torch.randn(2, 4)
    recorded = trace(lambda: checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward())
    assert names(recorded).count("addmm.default") == 1
    assert names(recorded).count("relu.default") == 2


def causal(_batch, _head, query, key):
    return query >= key


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_with_a_known_mask(compiled):
    length, heads, width = 300, 4, 16
    documents = torch.arange(length) // 100
    attention = torch.compile(flex_attention) if compiled else flex_attention
    for mask, pairs in (
        (causal, length * (length + 1) // 2),
        (lambda b, h, i, j: documents[i] == documents[j], 3 * 100 * 100),
    ):
        block_mask = create_block_mask(mask, None, None, length, length, device="cpu")
        q = torch.randn(2, heads, length, width, requires_grad=True)

        def step(q=q, block_mask=block_mask):
            attention(q, q, q, block_mask=block_mask).sum().backward()

        result = nearpeak.estimate(step, on="h200-sxm")
        forward, backward = (op for op in result.ops if "flex" in op.name)
        assert forward.flops == 2 * heads * pairs * (4 * width + 1)
        assert backward.flops == 2 * heads * pairs * (10 * width + 1)
        assert not result.coverage.unmodeled
        assert not any(op.name == "aten.new_zeros.default" for op in result.ops)


def test_flex_attention_with_masks_by_head():
    def only_first_head(_batch, head, query, key):
        return (head == 0) | (query == key)

    mask = create_block_mask(only_first_head, None, 2, 256, 256, device="cpu")
    q = torch.randn(1, 2, 256, 16)
    result = nearpeak.estimate(lambda: flex_attention(q, q, q, block_mask=mask), on="h200-sxm")
    (op,) = (op for op in result.ops if "flex" in op.name)
    assert op.flops == (256 * 256 + 256) * (4 * 16 + 1)


def test_flex_attention_with_a_mask_without_values():
    with nearpeak.fake():
        mask = create_block_mask(causal, None, None, 256, 256, device="cpu")
    q = torch.randn(1, 2, 256, 16)
    result = nearpeak.estimate(lambda: flex_attention(q, q, q, block_mask=mask), on="h200-sxm")
    (op,) = (op for op in result.ops if "flex" in op.name)
    assert op.flops == 2 * 256 * (4 * 16 + 1)  # each query sees a key
    assert result.coverage.operands == 1


def test_code_that_wants_memory():
    with pytest.raises(UsageError, match=r"test_transforms.py:\d+: the code asks for the memory.*custom_op.*live=True"):
        trace(lambda: torch.randn(400, 400).sin().numpy())
