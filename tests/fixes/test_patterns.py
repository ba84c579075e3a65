"""What `fix` recognizes in hand-written modules, and what looks alike and is something else."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nearpeak import machine
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.graphs import nearpeak_backend, rewrite_graph
from nearpeak.fixes.patterns import attention, experts, linears, loss, mlp, norms
from nearpeak.fixes.patterns.dataflow import traceable
from nearpeak.fixes.registry import ModelRun, Site, fixes, observe
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace


def run_of(model: nn.Module, *args: Any, **options: Any) -> ModelRun:
    return observe(model, args, {}, **options)


def sites(find: Any, model: nn.Module, *args: Any, **options: Any) -> list[Site]:
    return list(find(run_of(model, *args, **options)))


def is_found(site: Site) -> bool:
    """On a CPU the kernels do not run, which is the only reason that may be given."""
    return not site.skip or "needs a CUDA device" in site.skip


class RMSNorm(nn.Module):
    def __init__(self, columns: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, columns))


class CastRMSNorm(RMSNorm):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class SumRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) * self.weight


class OffsetRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x * (x.square().mean(-1, True) + 1e-6) ** -0.5) * (1.0 + self.weight)


class WrittenLayerNorm(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.shift


class HalfCentered(RMSNorm):
    """The mean is subtracted, and the squares are those before."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, True)) * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6) * self.weight


class OtherDimension(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, True) + 1e-6) * self.weight


class UnbiasedVariance(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6) * self.weight


class EpsOutside(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, True).sqrt() + 1e-3) * self.weight


class EpsOfDtype(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, True) + torch.finfo(x.dtype).eps) * self.weight


class DetachedNorm(RMSNorm):
    """The same values, and other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.detach().pow(2).mean(-1, True) + 1e-6) * self.weight


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (CastRMSNorm, "RMSNorm of 8, eps 1e-06"),
        (SumRMSNorm, "RMSNorm of 8, eps 1e-05"),
        (OffsetRMSNorm, "RMSNorm of 8, eps 1e-06, weight + 1"),
        (WrittenLayerNorm, "LayerNorm of 8, eps 1e-05"),
    ],
)
def test_norms_are_known_by_what_they_compute(kind: type[nn.Module], what: str) -> None:
    model = kind()
    x = torch.randn(2, 3, 8, requires_grad=True)
    (site,) = sites(norms.norms, model, x)
    assert (site.what, site.skip) == (what, "")
    expected = model(x)
    edits = Edits()
    site.change(edits)
    result = model(x)
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad(y.square().sum(), [x, *model.parameters()]) for y in (result, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert type(result.grad_fn) is not type(expected.grad_fn)  # something else has run
    edits.undo()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("kind", [HalfCentered, OtherDimension, UnbiasedVariance, EpsOutside, EpsOfDtype, DetachedNorm])
def test_what_looks_like_a_norm_is_left_alone(kind: type[nn.Module]) -> None:
    assert sites(norms.norms, kind(), torch.randn(2, 3, 8)) == []


def test_a_norm_keeps_the_dtype_that_its_code_returns() -> None:
    model = CastRMSNorm()
    (site,) = sites(norms.norms, model, torch.randn(2, 8))
    edits = Edits()
    halves = torch.randn(2, 8, dtype=torch.bfloat16)
    expected = model(halves)
    assert expected.dtype == torch.float32  # a weight in float32 times bfloat16
    site.change(edits)
    result = model(halves)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


def test_a_norm_whose_settings_change_runs_its_own_code() -> None:
    model = CastRMSNorm()
    model.eps = 1e-6
    (site,) = sites(norms.norms, model, torch.randn(2, 8))
    edits = Edits()
    site.change(edits)
    model.eps = 10.0
    x = torch.randn(2, 8)
    torch.testing.assert_close(model(x), CastRMSNorm.forward(model, x), rtol=0, atol=0)


class WrittenGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class WrittenSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ErfGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (WrittenGELU(), ["GELU (tanh) in 8 ops"]),
        (WrittenSiLU(), ["SiLU in 2 ops"]),
        (ErfGELU(), ["GELU in 5 ops"]),
        (QuickGELU(), []),
        (nn.GELU(), []),
        (nn.Tanh(), []),
    ],
)
def test_activations_are_known_by_their_values(model: nn.Module, what: list[str]) -> None:
    x = torch.randn(3, 5)
    found = sites(mlp.activations, model, x)
    assert [site.what for site in found] == what
    expected = model(x)
    for site in found:
        site.change(Edits())
        torch.testing.assert_close(model(x), expected)


def written_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class CallsGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return written_gelu(x) + 1.0


def test_functions_are_replaced_for_one_module_alone() -> None:
    model, other = CallsGELU(), CallsGELU()
    (site,) = sites(mlp.activations, model, torch.randn(4))
    assert site.what == "GELU (tanh) in written_gelu()"
    before = written_gelu
    edits = Edits()
    site.change(edits)
    assert "aten.gelu.default" in run_of(model, torch.randn(4)).calls[0].ops
    assert written_gelu is before
    assert "forward" not in vars(other)
    edits.undo()
    assert "forward" not in vars(model)


class Gated(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        self.act = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 20)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.both(x).chunk(2, dim=-1)
        return functional.silu(halves[self.first]) * halves[1 - self.first]


class Swapped(Packed):
    first = 1


def functions_of(model: nn.Module) -> set[str]:
    """The names of the functions that a rewritten forward calls."""
    cells = [cell.cell_contents for cell in model.forward.__func__.__closure__]  # type: ignore[attr-defined]
    (by_training,) = (content for content in cells if isinstance(content, dict) and True in content)
    return {getattr(value, "__name__", "") for value in by_training[True].__globals__.values()}


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (Gated(), "swiglu"),
        (Gated(WrittenGELU()), "geglu"),
        (Packed(), "swiglu_packed"),
        (Swapped(), "swiglu"),  # the packed kernel has the gate first
    ],
)
def test_gates(model: nn.Module, kernel: str) -> None:
    x = torch.randn(2, 3, 6)
    expected = model(x)
    (site,) = sites(mlp.gated_activations, model, x)
    assert is_found(site)
    site.change(Edits())
    assert kernel in functions_of(model)
    torch.testing.assert_close(model(x), expected)


def test_gates_call_their_linear_layers_with_hooks() -> None:
    model, seen = Gated(), []
    model.up.register_forward_hook(lambda *_: seen.append("up"))
    (site,) = sites(mlp.gated_activations, model, torch.randn(2, 6))
    seen.clear()
    site.change(Edits())
    model(torch.randn(2, 6))
    assert seen == ["up"]
    # a hook of the activation, which is not called any more, brings the own code back
    model.act.register_forward_hook(lambda *_: seen.append("act"))
    model(torch.randn(2, 6))
    assert sorted(seen) == ["act", "up", "up"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), CastRMSNorm(), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + self.first(x) * scale
        return x + self.second(self.norm(x))


class Difference(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x - self.first(x) * scale
        return x + self.second(self.norm(x))


def test_sums_before_norms() -> None:
    model, x = Block(), torch.randn(2, 3, 8)
    expected = model(x)
    (site,) = sites(norms.add_norms, model, x)
    assert is_found(site)
    edits = Edits()
    site.change(edits)
    assert "add_and_normalize" in functions_of(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x, scale=2.0), Block.forward(model, x, 2.0))  # another setting: its own code
    assert sites(norms.add_norms, Difference(), x) == []


class Projections(nn.Module):
    """Queries with a bias, keys without; of the values, the gate is of the same tensor, and the last of another one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 8, dtype=dtype), nn.Linear(6, 8, bias=False, dtype=dtype)
        self.gate, self.last = nn.Linear(6, 4, dtype=dtype), nn.Linear(4, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.full((), 2.0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        scores = self.query(x).mul_(0.5) * self.key(x)
        return self.last(torch.tanh(self.gate(x))).sum() + scores.sin().sum()


def test_gradients_of_one_tensor_add_up_inside_of_its_linear_layers() -> None:
    model, x = Projections(torch.float64), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    wanted = [x, *model.parameters()]
    expected, plain = torch.autograd.grad(model(x), wanted), [op.name for op in trace(model, x, grad=True).ops]
    (site,) = linears.linears_of_one_tensor(run_of(model, x, trains=True))
    assert (site.skip, site.what) == ("", "linear layers of one tensor (query, key, gate)")
    edits = Edits()
    site.change(edits)
    torch.testing.assert_close(torch.autograd.grad(model(x), wanted), expected)
    ops = [op.name for op in trace(model, x, grad=True).ops]
    additions = [names.count("aten.add.Tensor") for names in (plain, ops)]
    assert additions[0] - additions[1] == ops.count("aten.addmm_.default") == 2
    assert torch.autograd.gradgradcheck(model, x)  # and its second derivative
    # with a layer that is frozen
    model.key.requires_grad_(False)
    gradients = torch.autograd.grad(model(x), [x, model.scale])
    torch.testing.assert_close(gradients, expected[:2])
    # the layers are called with their hooks, and hold no results
    seen: list[str] = []
    model.key.register_forward_hook(lambda *_: seen.append("key"))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), model(x))
    assert seen == ["key", "key"]
    assert copied.gate._group_of_linears.members[1] is copied.key
    assert model.key._group_of_linears._last is None
    edits.undo()
    assert not {"forward", "_group_of_linears"} & {name for part in model.modules() for name in vars(part)}


@pytest.mark.parametrize("how", ["autocast", "no gradients", "vmap", "a hook before a layer", "another type"])
def test_linear_layers_of_one_tensor_in_other_modes_are_those_of_torch(how: str, monkeypatch: Any) -> None:
    model, x = Projections(), torch.randn(2, 3, 6)
    (site,) = linears.linears_of_one_tensor(run_of(model, x, trains=True))
    site.change(Edits())
    monkeypatch.setattr(linears._Linears, "apply", lambda *_: pytest.fail("it was shared"))
    if how == "a hook before a layer":
        model.key.register_forward_pre_hook(lambda *_: None)
    if how == "another type":
        nn.utils.parametrizations.weight_norm(model.key)
    if how == "vmap":
        torch.func.vmap(torch.func.grad(model))(x)
        return
    with torch.autocast("cpu", enabled=how == "autocast"), torch.set_grad_enabled(how != "no gradients"):
        assert model(x).isfinite()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_linear_layers_of_one_tensor_in_a_checkpoint_and_after_a_pickle(use_reentrant: bool) -> None:
    model, x = Projections(), torch.randn(2, 6, requires_grad=True)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    (site,) = linears.linears_of_one_tensor(run_of(model, x, trains=True))
    site.change(Edits())
    checkpoint(model, x, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close([each.grad for each in model.parameters()], list(expected))
    assert model.key._group_of_linears._last is None
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(torch.autograd.grad(loaded(x), list(loaded.parameters())), expected)


def test_linear_layers_around_a_change_in_place_compute_each_for_itself() -> None:
    class InPlace(Projections):
        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            first = self.query(x)
            with torch.no_grad():
                x.add_(1.0)
            return (first + self.key(x)).sum()

    model, x = InPlace(), torch.randn(2, 6)
    expected = model(x)
    (site,) = linears.linears_of_one_tensor(run_of(model, x, trains=True))
    site.change(Edits())
    torch.testing.assert_close(model(x), expected)


class WrittenAttention(nn.Module):
    def __init__(self, mask: Tensor | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(6, 6).tril() if mask is None else mask)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (y.view(batch, tokens, 2, width // 2).transpose(1, 2) for y in self.qkv(x).split(width, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(self.mask[:tokens, :tokens] == 0, float("-inf"))
        weights = self.drop(functional.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class ReturnsWeights(WrittenAttention):
    def forward(self, x: Tensor) -> Any:
        q, k, v = (y.unsqueeze(1) for y in self.qkv(x).split(8, dim=2))
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        return weights @ v, weights


class MaskArgument(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(0.3 * (q @ k.transpose(-2, -1)) + mask, dim=-1) @ v


class OverQueries(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1), dim=-2) @ v


class ScaledMask(nn.Module):
    """The factor applies to the mask too."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-2, -1) + mask) * 0.5, dim=-1) @ v


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        (None, "attention written out, causal"),
        (torch.ones(6, 6), "attention written out"),
        (torch.ones(6, 6).tril() - torch.ones(6, 6).tril(-3), "attention written out"),  # a window
    ],
)
def test_attention_written_out(mask: Tensor | None, what: str) -> None:
    model, x = WrittenAttention(mask), torch.randn(2, 6, 8)
    expected, short = model(x), model(x[:, :4])
    (site,) = sites(attention.attentions, model, x)
    assert (site.what, site.skip) == (what, "")
    site.change(Edits())
    assert "_attend" in functions_of(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x[:, :4]), short)


class MadeMask(WrittenAttention):
    """Makes its mask in the forward, and keys have a bias, whose gradient is 0."""

    kind = "ones"

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (y.view(batch, tokens, 2, width // 2).transpose(1, 2) for y in self.qkv(x).split(width, dim=2))
        scores = (q @ k.mT) / (width // 2) ** 0.5
        if self.kind == "ones":
            hidden = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool, device=x.device), 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        elif self.kind == "new_ones":
            scores = scores.masked_fill(x.new_ones(tokens, tokens).tril() == 0, torch.finfo(x.dtype).min)
        else:
            scores = scores + x.new_full((tokens, tokens), float("-inf")).triu(1)
        return self.out((torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, tokens, width))


@pytest.mark.parametrize("kind", ["ones", "new_ones", "new_full"])
def test_attention_with_a_mask_made_in_the_forward(kind: str) -> None:
    model, x = MadeMask(), torch.randn(2, 6, 8)
    model.kind = kind
    expected, longer = model(x), model(torch.cat((x, x), 1))
    (site,) = sites(attention.attentions, model, x)
    assert (site.what, site.skip) == ("attention written out, causal", "")
    site.change(Edits())
    assert "_attend" in functions_of(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(torch.cat((x, x), 1)), longer)


class RotatedAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        return torch.softmax(q @ k.mT * 0.3, dim=-1) @ v


def test_rotations_in_a_forward_that_is_rewritten_are_replaced() -> None:
    model, angles = RotatedAttention(), torch.randn(6, 4)
    arguments = *torch.randn(3, 2, 3, 6, 8), angles.cos(), angles.sin()
    expected = model(*arguments)
    for each in fixes(["attention", "rotary"]):
        (site,) = each.sites(run_of(model, *arguments))
        assert is_found(site)
        site.change(Edits())
    assert {"_attend", "call"} <= functions_of(model)
    torch.testing.assert_close(model(*arguments), expected)


def test_attention_is_causal_only_as_far_as_it_was_seen() -> None:
    """A window as long as the batch looks causal."""
    mask = torch.ones(12, 12).tril() - torch.ones(12, 12).tril(-6)
    model, x = WrittenAttention(mask), torch.randn(2, 12, 8)
    expected = model(x)
    (site,) = sites(attention.attentions, model, x[:, :6])
    assert site.what == "attention written out, causal"
    site.change(Edits())
    torch.testing.assert_close(model(x), expected)


def test_attention_with_masks_of_the_caller() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    mask = torch.randn(5, 5)
    model = MaskArgument()
    expected = model(q, k, v, mask)
    (site,) = sites(attention.attentions, model, q, k, v, mask)
    assert (site.what, site.skip) == ("attention written out", "")
    site.change(Edits())
    torch.testing.assert_close(model(q, k, v, mask), expected)
    assert sites(attention.attentions, ScaledMask(), q, k, v, mask) == []
    assert sites(attention.attentions, OverQueries(), q, k, v) == []
    assert sites(attention.attentions, ReturnsWeights(), torch.randn(2, 6, 8)) == []


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate_neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rotate_backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


class Rotates(nn.Module):
    function = "halves"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if self.function == "halves":
            return rotate_halves(x, cos, sin)
        if self.function == "neighbors":
            return rotate_neighbors(x, cos, sin)
        if self.function == "backwards":
            return rotate_backwards(x, cos, sin)
        wide = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
        return rotate_pair(x, x[:, :1], *wide)


class ComparesRotation(Rotates):
    """Chooses by the function itself."""

    chosen = staticmethod(rotate_halves)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return rotate_halves(x, cos, sin) if self.chosen is rotate_halves else x


def test_a_rotation_that_is_compared_is_replaced() -> None:
    model, angles = ComparesRotation(), torch.randn(5, 4)
    arguments = torch.randn(2, 3, 5, 8), angles.cos(), angles.sin()
    expected = model(*arguments)
    (site,) = sites(attention.rotaries, model, *arguments)
    site.change(Edits())
    assert not torch.equal(model(*arguments), arguments[0])
    torch.testing.assert_close(model(*arguments), expected)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("halves", ["rotary embedding of x in rotate_halves()"]),
        ("neighbors", ["rotary embedding of x, interleaved in rotate_neighbors()"]),
        ("pair", ["rotary embedding of q and k in rotate_pair()"]),
        ("backwards", []),
    ],
)
def test_rotary_embeddings(function: str, what: list[str]) -> None:
    model, x, angles = Rotates(), torch.randn(2, 3, 5, 8), torch.rand(5, 4) * 6.0
    model.function = function
    arguments = (x, angles.cos(), angles.sin())
    expected = model(*arguments)
    found = sites(attention.rotaries, model, *arguments)
    assert [site.what for site in found] == what
    for site in found:
        site.change(Edits())
        torch.testing.assert_close(model(*arguments), expected)


class Experts(nn.Module):
    halves = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 12, 8) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 8, 6) * 0.3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(4):
            token, choice = torch.where(chosen == expert)
            halves = (x[token] @ self.gate_up[expert].t()).chunk(2, -1)
            inner = functional.silu(halves[self.halves[0]]) * halves[self.halves[1]]
            result.index_add_(0, token, inner @ self.down[expert].t() * weights[token, choice, None])
        return result


class ExpertsWithModule(Experts):
    """The activation is a child, which may get a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.act(x)
        return super().forward(x, chosen, weights)


def test_a_hook_of_a_child_that_is_not_called_any_more_brings_the_code_back() -> None:
    model, seen = ExpertsWithModule(), []
    arguments = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.rand(3, 2)
    (site,) = sites(experts.experts, model, *arguments)
    site.change(Edits())
    model.act.register_forward_hook(lambda *_: seen.append("act"))
    model(*arguments)
    assert seen == ["act"]


class SwappedExperts(Experts):
    halves = (1, 0)


def test_experts() -> None:
    x, chosen, weights = torch.randn(7, 8), torch.tensor([[0, 1], [2, 3]] * 3 + [[1, 3]]), torch.rand(7, 2)
    model = Experts()
    expected = model(x, chosen, weights)
    (site,) = sites(experts.experts, model, x, chosen, weights)
    assert is_found(site) and site.what == "4 experts of 8 x 6, silu"
    site.change(Edits())
    torch.testing.assert_close(model(x, chosen, weights), expected)
    assert sites(experts.experts, SwappedExperts(), x, chosen, weights) == []


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].float().reshape(-1, logits.size(-1)), target[:, 1:].flatten())


def smooth_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.view(-1, 40), target.view(-1), ignore_index=3, label_smoothing=0.1, reduction="sum"
    )


def scaled_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Logits that something else reads are logits."""
    return functional.cross_entropy((logits / 2.0).flatten(0, 1), target.flatten()) + logits.square().mean()


def first_classes(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits[..., :39].reshape(-1, 39), target.clamp(max=38).flatten())


def in_place_loss(logits: Tensor, target: Tensor) -> Tensor:
    logits.mul_(0.5)
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def custom_loss(logits: Tensor, target: Tensor) -> Tensor:
    return Square.apply(logits).mean()


@pytest.mark.parametrize(
    ("criterion", "is_site"),
    [(token_loss, True), (smooth_loss, True), (scaled_loss, False), (first_classes, False), (in_place_loss, False),
     (custom_loss, False)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_without_logits(criterion: Any, is_site: bool, dtype: torch.dtype) -> None:
    if criterion is token_loss and dtype == torch.float64:
        pytest.skip("float() is no wider dtype then")
    model, x, target = Classifier().to(dtype), torch.randn(2, 5, 8, dtype=dtype), torch.randint(40, (2, 5))
    found = sites(loss.linear_cross_entropies, model, x, trains=True, loss=lambda logits: criterion(logits, target))
    assert [is_found(site) for site in found] == [True] * is_site

    def results() -> list[Tensor]:
        model.zero_grad()
        logits = model(x)
        value = criterion(logits, target)
        value.backward()
        return [value.detach(), logits.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = results()
    edits = Edits()
    # whatever the criterion is, deferred logits are right
    edits.set_forward(model.head, loss.deferred_forward(model.head, "weight", "bias", []))
    for one, other in zip(results(), expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.dtype == other.dtype
    run_of(model, x, trains=True)  # it can be observed again
    edits.undo()


def test_a_loss_without_logits_is_estimated() -> None:
    """On fake tensors, which have no memory."""
    model, x, target = Classifier(), torch.randn(2, 5, 8), torch.randint(40, (2, 5))
    Edits().set_forward(model.head, loss.deferred_forward(model.head, "weight", "bias", []))

    def step() -> None:
        token_loss(model(x), target).backward()

    ops = [op.packet for op in trace(step, target=target_of(machine("h200-sxm"))).ops]
    assert "nearpeak.linear_cross_entropy" in ops
    assert "aten._log_softmax" not in ops
    assert model.head.weight.grad is None


def test_fixes_of_one_forward_add_up() -> None:
    class Both(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x)
            y = self.norm(x)
            return functional.silu(self.first(y)) * self.second(y)

    model, x = Both(), torch.randn(2, 3, 8)
    expected = model(x)
    run = run_of(model, x)
    (gate,), (norm,) = list(mlp.gated_activations(run)), list(norms.add_norms(run))
    edits = Edits()
    gate.change(edits)
    norm.change(edits)
    assert {"add_and_normalize", "swiglu"} <= functions_of(model)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(run_of(model, x).output.shape, expected.shape)  # it can be observed again
    edits.undo()
    assert "forward" not in vars(model)


class InlineNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.linspace(0.5, 1.5, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.out((y * self.weight).to(x.dtype))


class OtherRows(InlineNorm):
    """Divided by the root of the squares of something else."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt((x + 1.0).pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.out(y * self.weight)


def test_norms_inside_of_a_forward() -> None:
    model, x = InlineNorm(), torch.randn(2, 3, 8)
    expected = model(x)
    (site,) = sites(norms.inline_norms, model, x)
    assert (site.what, site.skip) == ("RMSNorm", "")
    site.change(Edits())
    assert "_normalize" in functions_of(model)
    torch.testing.assert_close(model(x), expected)
    assert sites(norms.inline_norms, OtherRows(), x) == []


@pytest.mark.slow
def test_patterns_in_captured_graphs() -> None:
    counts: list[dict[str, int]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(rewrite_graph(module))
        return module.forward

    torch._dynamo.reset()
    model, x = WrittenAttention(), torch.randn(2, 6, 8)
    result = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(result, model(x))
    assert counts == [{"attention": 1}]
    graph = torch.fx.symbolic_trace(Packed()).graph
    assert list(mlp.Gates(children={})(graph)) == [""]


def test_traceable_functions_run_on_tensors() -> None:
    assert traceable(torch.add)(torch.ones(1), torch.ones(1)).item() == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager fixes", "graph"])
def test_kernels_run_on_a_gpu(backend: str) -> None:
    """All patterns in one model in bfloat16, with kernels required, against float32."""

    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gated, self.attention = CastRMSNorm(64), nn.Linear(64, 128), nn.Linear(64, 192)
            self.block, self.head = nn.Linear(64, 64), nn.Linear(64, 128)
            self.register_buffer("mask", torch.ones(32, 32).tril())

        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, width = x.shape
            q, k, v = (y.view(batch, tokens, 2, 32).transpose(1, 2) for y in self.attention(x).split(width, dim=2))
            scores = (q @ k.transpose(-2, -1) * 0.2).masked_fill(self.mask[:tokens, :tokens] == 0, float("-inf"))
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
            gate, up = self.gated(self.norm(x)).chunk(2, dim=-1)
            return self.head(x + self.block(functional.silu(gate) * up))

    torch.manual_seed(0)
    model, x = Everything().cuda(), torch.randn(2, 32, 64, device="cuda")
    target = torch.randint(128, (64,), device="cuda")

    def criterion(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), target)

    expected = torch.autograd.grad(criterion(model(x)), list(model.parameters()))
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    plain = torch.autograd.grad(criterion(model(x)), list(model.parameters()))
    run: Any = model
    if backend == "graph":
        torch._dynamo.reset()
        run = torch.compile(model, backend=nearpeak_backend)
    else:
        edits = Edits()
        for find in (
            loss.linear_cross_entropies,
            attention.attentions,
            norms.norms,
            mlp.gated_activations,
            norms.add_norms,
        ):
            (site,) = sites(find, model, x, trains=True, loss=criterion)
            assert not site.skip, site.skip
            site.change(edits)
    result = torch.autograd.grad(criterion(run(x)), list(model.parameters()))
    for one, other, exact in zip(result, plain, expected, strict=True):
        own = (other.float() - exact).norm() / exact.norm()
        assert float((one.float() - exact).norm() / exact.norm()) <= 1.5 * float(own) + 0.01
