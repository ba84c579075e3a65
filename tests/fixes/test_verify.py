"""Wrong implementations are caught, right ones are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nearpeak.errors import UsageError
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.engine import _check_module
from nearpeak.fixes.verify import Inputs, Reference, check_causality, problem, relative_error, variants
from tests.fixes.models import Attention, Mlp, Model, Norm, make_batch, make_model

WIDTH = 32


def norm(self: Any, x: Tensor, eps: float = 1e-6, power: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.pow(power).mean(-1, keepdim=True) + eps)
    return self.weight * (wide * scale).to(x.dtype)


def attention(
    self: Any,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = True,
    padding: bool = True,
    scale: float = 1.0,
    window: int = 10**9,
    dropout: bool = True,
    swap: bool = False,
) -> Tensor:
    rows, length, width = x.shape
    q, k, v = self.project(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
    q, k = (k, q) if swap else (q, k)
    visible = torch.ones(length, length, dtype=torch.bool)
    if causal:
        visible = visible.tril().triu(1 - window)
    if mask is not None and padding:
        visible = visible & (mask[:, None, None] != 0)
    bias = torch.zeros(visible.shape, dtype=x.dtype).masked_fill(~visible, -1e9)
    probability = self.dropout if self.training and dropout else 0.0
    attended = functional.scaled_dot_product_attention(
        q, k, v, bias, probability, scale=scale / (width // self.heads) ** 0.5
    )
    return self.out(attended.transpose(1, 2).reshape(rows, length, width))


def mlp(self: Any, x: Tensor) -> Tensor:
    return self.down(functional.silu(self.gate(x)) * self.up(x))


WRONG: dict[str, tuple[type, Callable[..., Any]]] = {
    "a wrong eps": (Norm, lambda self, x: norm(self, x, eps=1e-5)),
    "an eps outside of the root": (
        Norm,
        lambda self, x: self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)),
    ),
    "no eps": (Norm, lambda self, x: norm(self, x, eps=0.0)),
    "a mean that is subtracted": (Norm, lambda self, x: norm(self, x - x.mean(-1, keepdim=True))),
    "a weight that is left out": (Norm, lambda self, x: norm(self, x) / self.weight.detach()),
    "a weight plus 1": (Norm, lambda self, x: norm(self, x) * (1 + 1 / self.weight)),
    "a cast too early": (Norm, lambda self, x: norm(self, x, dtype=torch.bfloat16)),
    "the input's gradient detached": (Norm, lambda self, x: norm(self, x.detach())),
    "the weight's gradient detached": (Norm, lambda self, x: norm(self, x) * (self.weight.detach() / self.weight)),
    "another dtype of the result": (Norm, lambda self, x: norm(self, x).double()),
    "a gradient through part of the formula": (
        Norm,
        lambda self, x: self.weight * x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.eps),
    ),
    "the causal mask dropped": (Attention, lambda self, x, mask=None: attention(self, x, mask, causal=False)),
    "the padding mask dropped": (Attention, lambda self, x, mask=None: attention(self, x, mask, padding=False)),
    "a window": (Attention, lambda self, x, mask=None: attention(self, x, mask, window=20)),
    "a wrong scale": (Attention, lambda self, x, mask=None: attention(self, x, mask, scale=1.02)),
    "queries and keys exchanged": (Attention, lambda self, x, mask=None: attention(self, x, mask, swap=True)),
    "a row that is the first one's": (
        Attention,
        lambda self, x, mask=None: attention(self, x[:1], None if mask is None else mask[:1]).expand_as(x),
    ),
    "an odd length that is cut": (
        Attention,
        lambda self, x, mask=None: functional.pad(
            attention(self, x[:, : x.shape[1] // 2 * 2], None if mask is None else mask[:, : x.shape[1] // 2 * 2]),
            (0, 0, 0, x.shape[1] % 2),
        ),
    ),
    "gate and up exchanged": (Mlp, lambda self, x: self.down(functional.silu(self.up(x)) * self.gate(x))),
    "another activation": (Mlp, lambda self, x: self.down(functional.gelu(self.gate(x)) * self.up(x))),
    "the bias left out": (
        Mlp,
        lambda self, x: functional.linear(functional.silu(self.gate(x)) * self.up(x), self.down.weight),
    ),
    "a gradient that is doubled": (Mlp, lambda self, x: 2 * mlp(self, x) - mlp(self, x).detach()),
    "a result that is wrong in training alone": (Mlp, lambda self, x: mlp(self, x) * (1.001 if self.training else 1)),
    "a result that is wrong in evaluation alone": (Mlp, lambda self, x: mlp(self, x) * (1 if self.training else 1.001)),
}
RIGHT: dict[str, tuple[type, Callable[..., Any]]] = {
    "torch's norm": (Norm, lambda self, x: functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)),
    "the same norm": (Norm, norm),
    "torch's attention": (Attention, attention),
    "the same network": (Mlp, mlp),
    "a gate of its own formula": (
        Mlp,
        lambda self, x: self.down(self.gate(x) * torch.sigmoid(self.gate(x)) * self.up(x)),
    ),
}


def pair(kind: type, forward: Callable[..., Any], dtype: torch.dtype, **options: Any) -> tuple[Any, Any, Inputs]:
    """A module, its changed copy, and inputs."""
    torch.manual_seed(0)
    module = kind(WIDTH, 2, **options) if kind is Attention else kind(WIDTH)
    module = module.to(dtype).train()
    changed = copy.deepcopy(module)
    Edits().set_forward(changed, forward)
    x = torch.randn(3, 24, WIDTH, dtype=dtype, requires_grad=True)
    kwargs = {"mask": torch.ones(3, 24, dtype=torch.long)} if kind is Attention else {}
    return module, changed, Inputs(name="the batch", args=(x,), kwargs=kwargs)


NARROW = pytest.param(torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_is_caught(name, dtype):
    module, changed, inputs = pair(*WRONG[name], dtype)
    assert problem(_check_module(module, changed, inputs, True)) != ""


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_implementation_passes(name, dtype):
    module, changed, inputs = pair(*RIGHT[name], dtype)
    errors = _check_module(module, changed, inputs, True)
    assert problem(errors) == ""
    assert {error.reference for error in errors} == {"float64"}


def test_dropout_that_is_lost_is_caught():
    def without(self, x, mask=None):
        return attention(self, x, mask, dropout=False)

    module, changed, inputs = pair(Attention, without, torch.float32, dropout=0.3)
    assert "spread over seeds" in problem(_check_module(module, changed, inputs, True))
    module, changed, inputs = pair(Attention, attention, torch.float32, dropout=0.3)
    assert problem(_check_module(module, changed, inputs, True)) == ""


class Tables(nn.Module):
    """Takes a table of as many positions as its rows have, or of 24 alone."""

    def __init__(self, any_length=True):
        super().__init__()
        self.weight, self.any_length = nn.Parameter(torch.ones(8)), any_length

    def forward(self, x, table):
        x = functional.dropout(x * self.weight, 0.3, self.training)
        return x * table if self.any_length else x * torch.ones(24, 8)


def test_tables_of_positions_are_cut_with_the_rows_and_what_the_original_refuses_is_left_out():
    x, table = torch.randn(3, 24, 8), torch.randn(24, 8)
    inputs = Inputs(name="the batch", args=(x, table), kwargs={})
    cut = next(each for each in variants((x, table), {}, trains=True) if each.name.endswith("positions"))
    assert [each.shape for each in cut.args] == [(3, 23, 8), (23, 8)]
    for module, others in ((Tables(), {"one row", "23 positions"}), (Tables(any_length=False), {"one row"})):
        errors = _check_module(module, copy.deepcopy(module), inputs, True)
        assert problem(errors) == ""
        names = {error.what.split(", ")[1] for error in errors if "without dropout" in error.what}
        assert names & {"one row", "23 positions"} == others


def test_a_leak_from_later_tokens_is_caught_in_the_whole_model():
    tokens, mask = make_batch()
    model = make_model()
    inputs = Inputs(name="the batch", args=(tokens, mask), kwargs={})
    assert problem(check_causality(model, model, inputs)) == ""
    changed = copy.deepcopy(model)
    Edits().set_forward(changed.attention, lambda self, x, mask=None: attention(self, x, mask, causal=False))
    assert "causality" in problem(check_causality(model, changed, inputs))
    # A model that is not causal may look at later tokens.
    assert check_causality(changed, changed, inputs) == []


def test_results_that_are_not_repeatable_are_refused():
    class Counting(Model):
        calls = 0

        def forward(self, tokens, mask=None):
            type(self).calls += 1
            return super().forward(tokens, mask) * type(self).calls

    with pytest.raises(UsageError, match="not repeatable"):
        Reference(Counting()).probe(Inputs(name="the batch", args=make_batch(), kwargs={}))


def test_variants_have_other_sizes_and_paddings():
    tokens, mask = make_batch(3, 24)
    drawn = {inputs.name: inputs for inputs in variants((tokens, mask), {}, trains=True, autocast=True)}
    assert set(drawn) == {
        "the batch", "the other mode", "no gradients", "autocast", "one row", "23 positions", "padded on the right",
        "padded on the left",
    }  # fmt: skip
    assert [tuple(each.shape) for each in drawn["23 positions"].args] == [(3, 23), (3, 23)]
    assert drawn["padded on the right"].args[1][:, -1].tolist() == [0, 0, 0]
    assert drawn["padded on the left"].args[1][:, 0].tolist() == [0, 0, 0]


def test_weights_gradients_buffers_and_random_states_are_untouched():
    model = make_model()
    model.register_buffer("count", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.count.add_(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [torch.zeros_like(each) for each in model.parameters()]
    for parameter, gradient in zip(model.parameters(), grads, strict=True):
        parameter.grad = gradient
    inputs = Inputs(name="the batch", args=make_batch()[:1], kwargs={})
    state = torch.get_rng_state()
    Reference(model).check(model, inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is gradient
        assert not gradient.any()
    assert torch.equal(torch.get_rng_state(), state)


def test_equal_infinities_have_no_error():
    x = torch.tensor([1.0, float("-inf")])
    assert relative_error(x, x.double()) == 0.0
    assert relative_error(torch.tensor([1.0, 2.0]), x) > 1
    assert relative_error(torch.tensor([float("nan"), 1.0]), torch.ones(2)) > 1e9


class Cancels(nn.Module):
    """Has a parameter whose gradient is `rest` times that of a sum."""

    def __init__(self, rest: float) -> None:
        super().__init__()
        self.weight, self.shift, self.rest = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH)), rest

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.rest * self.shift


def test_a_gradient_that_vanishes_is_judged_beside_the_largest() -> None:
    """Kernels of attention compute 1e-9 where large terms cancel to 1e-12."""
    torch.manual_seed(0)
    inputs = Inputs(name="the batch", args=(torch.randn(4, WIDTH),), kwargs={}, grad=True)
    original = Cancels(1e-12)
    assert problem(Reference(original).check(Cancels(1e-9), inputs)) == ""
    assert "gradient of shift" in problem(Reference(original).check(Cancels(1e-2), inputs))
    assert "gradient of shift" in problem(Reference(Cancels(1e-3)).check(Cancels(1.1e-3), inputs))
