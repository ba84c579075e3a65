"""The fixes that findings of `transformers` models ask for, each of which can be switched on and off on one model.

Used by `benchmarks/model_fixes.py`, which times them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_steps import Steps, pad_vocabulary
from torch.nn import functional
from transformers import activations
from transformers.integrations import moe
from transformers.loss import loss_utils
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.vit import modeling_vit

import nearpeak

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and what that is with the fix."""
compiled = torch.compile(dynamic=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What to change for a finding, and which findings it answers: those of its rules at lines of `lines`."""

    rules: tuple[str, ...]
    lines: tuple[Callable[..., Any], ...]
    patches: Callable[[Steps], list[Patch]]

    def answers(self, finding: nearpeak.Finding) -> bool:
        file, _, line = finding.source.rpartition(":")
        if finding.rule not in self.rules or not line.isdigit():
            return False
        for function in self.lines:
            source, first = inspect.getsourcelines(function)
            name = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").name
            if name == Path(file).name and first <= int(line) < first + len(source):
                return True
        return False


@contextlib.contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Has the patches in force inside, and nothing left of them after."""
    before = [vars(owner).get(name, patched) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(patches, before, strict=True):
            if value is patched:  # it was inherited, or not there
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


def fused_optimizer(steps: Steps) -> list[Patch]:
    return [(steps, "optimizer", torch.optim.AdamW(steps.model.parameters(), lr=1e-4, fused=True))]


def padded_vocabulary(steps: Steps) -> list[Patch]:
    model = copy.deepcopy(steps.model)
    pad_vocabulary(model)
    return [(steps, "model", model), (steps, "optimizer", torch.optim.AdamW(model.parameters(), lr=1e-4))]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """On logits as they are: autocast would cast them to float32."""
    with torch.autocast(logits.device.type, enabled=False):
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return cross_entropy(logits, functional.pad(labels, (0, 1), value=-100)[..., 1:])


def tanh_gelu(self: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
    return functional.gelu(input, approximate="tanh")


def rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@compiled
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def llama_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


def apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    return gated(*gate_up.chunk(2, dim=-1))


@compiled
def weigh(projected: torch.Tensor, absent: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return projected.masked_fill(absent, 0.0) * weights.unsqueeze(-1)


def experts(self: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`grouped_mm_experts_forward` of transformers 5.17 for experts without biases, with `weigh` as one function."""
    (tokens, width), choices = hidden_states.shape, chosen.size(-1)
    expert, order = torch.sort(chosen.reshape(-1))
    selected = hidden_states[order // choices]
    counted = expert.int() if expert.is_cuda else expert.float()
    counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    absent = (expert >= self.num_experts).unsqueeze(-1)
    expert.clamp_(max=self.num_experts - 1)
    selected.masked_fill_(absent, 0.0)
    projected = moe._grouped_linear(selected, self.gate_up_proj, offsets, is_transposed=self.is_transposed)
    projected = self._apply_gate(projected.masked_fill(absent, 0.0))
    projected = moe._grouped_linear(projected, self.down_proj, offsets, is_transposed=self.is_transposed)
    weighted = weigh(projected, absent, weights.reshape(-1)[order])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return weighted[inverse].view(tokens, choices, width).sum(dim=1).to(hidden_states.dtype)


@compiled
def projections(x: torch.Tensor, *weights_and_biases: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pairs = zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)
    return tuple(functional.linear(x, weight, bias) for weight, bias in pairs)


def joined_projections(steps: Steps, kind: type, names: Sequence[str]) -> list[Patch]:
    """Query, key and value in one compiled function: the first module computes all, the others give what it left."""
    patches: list[Patch] = []
    for attention in (module for module in steps.model.modules() if isinstance(module, kind)):
        linears = [getattr(attention, name) for name in names]
        left: list[torch.Tensor] = []

        def first(x: torch.Tensor, linears: Any = linears, left: list[torch.Tensor] = left) -> torch.Tensor:
            query, *others = projections(x, *(tensor for linear in linears for tensor in (linear.weight, linear.bias)))
            left[:] = others
            return query

        def other(x: torch.Tensor, left: list[torch.Tensor] = left) -> torch.Tensor:
            return left.pop(0)

        patches += [(linears[0], "forward", first), *((linear, "forward", other) for linear in linears[1:])]
    return patches


@compiled
def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return functional.layer_norm(total, weight.shape, weight, bias, eps), total


def vit_residuals(steps: Steps) -> list[Patch]:
    """Each sum with the norm after it, which is that of the next layer for the second sum of a layer."""
    encoder = steps.model.vit
    layers = list(encoder.layers)
    following = [layer.layernorm_before for layer in layers[1:]] + [encoder.layernorm]
    normed: dict[int, torch.Tensor] = {}
    after = {id(layer): norm for layer, norm in zip(layers, following, strict=True)}

    def fused(x: torch.Tensor, residual: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return add_and_norm(x, residual, norm.weight, norm.bias, norm.eps)

    def layer(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **options: Any) -> torch.Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **options)
        middle, total = fused(self.dropout(attended), hidden_states, self.layernorm_after)
        norm = after[id(self)]
        normed[id(norm)], total = fused(self.dropout(self.mlp(middle)), total, norm)
        return total

    def given(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda _: normed.pop(id(norm))

    return [(modeling_vit.ViTLayer, "forward", layer), *((norm, "forward", given(norm)) for norm in following)]


def bert_output(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    norm = self.LayerNorm
    hidden_states = self.dropout(self.dense(hidden_states))
    return add_and_norm(hidden_states, input_tensor, norm.weight, norm.bias, norm.eps)[0]


def patch(owner: Any, name: str, value: Any, *rules: str) -> Fix:
    """A fix that replaces one function wherever it is called."""
    return Fix(rules=rules, lines=(getattr(owner, name),), patches=lambda _: [(owner, name, value)])


def rotary(modeling: Any) -> Fix:
    return patch(modeling, "apply_rotary_pos_emb", compiled(modeling.apply_rotary_pos_emb), "unfused-rotary")


OPTIMIZER = Fix(rules=("unfused-optimizer",), lines=(Steps.train,), patches=fused_optimizer)
CAUSAL_LOSS = Fix(
    rules=("logits-upcast",),
    lines=(loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy),
    patches=lambda steps: [(steps.model, "_loss_function", causal_loss)],
)
CASTS = ("unfused-pointwise", "repeated-cast")
"""Both are answered at once: of the casts of one input, those of its gradient, and their sum."""
FIXES: dict[str, tuple[Fix, ...]] = {
    "gpt2": (
        patch(activations.NewGELUActivation, "forward", tanh_gelu, "unfused-pointwise"),
        Fix(rules=("ragged-product",), lines=(modeling_gpt2.GPT2LMHeadModel.forward,), patches=padded_vocabulary),
        CAUSAL_LOSS,
        OPTIMIZER,
    ),
    "llama": (
        patch(modeling_llama.LlamaRMSNorm, "forward", rms_norm, "unfused-norm"),
        CAUSAL_LOSS,
        rotary(modeling_llama),
        OPTIMIZER,
        patch(modeling_llama.LlamaMLP, "forward", llama_mlp, "unfused-gated-activation"),
    ),
    "qwen3_moe": (
        patch(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", rms_norm, "unfused-norm"),
        Fix(
            rules=("unfused-pointwise",),
            lines=(moe.grouped_mm_experts_forward,),
            patches=lambda _: [(moe.ALL_EXPERTS_FUNCTIONS, "_local_mapping", {"grouped_mm": experts})],
        ),
        rotary(modeling_qwen3_moe),
        OPTIMIZER,
        patch(modeling_qwen3_moe.Qwen3MoeExperts, "_apply_gate", apply_gate, "unfused-gated-activation"),
        CAUSAL_LOSS,
    ),
    "vit": (
        Fix(
            rules=CASTS,
            lines=(modeling_vit.ViTAttention.forward,),
            patches=lambda steps: joined_projections(steps, modeling_vit.ViTAttention, ("q_proj", "k_proj", "v_proj")),
        ),
        OPTIMIZER,
        Fix(rules=("unfused-residual",), lines=(modeling_vit.ViTLayer.forward,), patches=vit_residuals),
    ),
    "bert": (
        Fix(
            rules=CASTS,
            lines=(modeling_bert.BertSelfAttention.forward,),
            patches=lambda steps: joined_projections(steps, modeling_bert.BertSelfAttention, ("query", "key", "value")),
        ),
        OPTIMIZER,
        Fix(
            rules=("ragged-product",),
            lines=(modeling_bert.BertLMPredictionHead.forward,),
            patches=padded_vocabulary,
        ),
        Fix(
            rules=("logits-upcast",),
            lines=(modeling_bert.BertForMaskedLM.forward,),
            patches=lambda _: [(modeling_bert, "CrossEntropyLoss", lambda: cross_entropy)],
        ),
        Fix(
            rules=("unfused-residual",),
            lines=(modeling_bert.BertSelfOutput.forward, modeling_bert.BertOutput.forward),
            patches=lambda _: [
                (modeling_bert.BertSelfOutput, "forward", bert_output),
                (modeling_bert.BertOutput, "forward", bert_output),
            ],
        ),
    ),
}
"""In the order of what they save on an H200. BERT's GELU is one kernel as it is."""
