"""A decoder of Hugging Face written again with nearpeak's kernels: how fast its training step can be by hand.

`Decoder(model)` has the weights of a Llama or Qwen3 of `transformers`, those of queries, keys and values as one matrix,
and those of gate and up as another. `benchmarks.models.fix --ways eager,hand` times its steps beside the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from nearpeak import kernels


class DecoderLayer(torch.nn.Module):
    """Takes the sum of the residual stream apart from what the last layer adds to it, and returns both."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.dim = attention.head_dim
        self.rows = [projection.weight.shape[0] for projection in projections]
        self.qkv = Parameter(torch.cat([projection.weight.detach() for projection in projections]))
        self.out = Parameter(attention.o_proj.weight.detach().clone())
        self.gate_and_up = Parameter(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]))
        self.down = Parameter(mlp.down_proj.weight.detach().clone())
        self.first_norm, self.second_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = (_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self.eps = layer.input_layernorm.variance_epsilon

    def forward(self, x: Tensor, added: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`x` is the residual stream before `added`: [batch, tokens, features]."""
        if added is None:
            normed = kernels.rms_norm(x, self.first_norm, eps=self.eps)
        else:
            normed, x = kernels.add_rms_norm(added, x, self.first_norm, eps=self.eps)
        normed, x = kernels.add_rms_norm(self.attend(normed, cos, sin), x, self.second_norm, eps=self.eps)
        gated = kernels.gemm(normed, self.gate_and_up, activation="silu", gated=True)
        return x, kernels.gemm(gated, self.down)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = kernels.gemm(x, self.qkv).split(self.rows, -1)
        query, key, value = (part.unflatten(-1, (-1, self.dim)) for part in parts)  # [batch, tokens, heads, dim]
        if self.query_norm is not None:
            query = kernels.rms_norm(query, self.query_norm, eps=self.eps)
            key = kernels.rms_norm(key, self.key_norm, eps=self.eps)
        query, key = kernels.rotary_pair(query, key, cos, sin)
        result = kernels.attention(*(part.transpose(1, 2) for part in (query, key, value)), causal=True)
        return kernels.gemm(result.transpose(1, 2).flatten(2), self.out)


class Decoder(torch.nn.Module):
    """The loss of a causal language model, from its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model.model
        self.embedding = Parameter(inner.embed_tokens.weight.detach().clone())
        is_tied = model.lm_head.weight is inner.embed_tokens.weight
        self.head = self.embedding if is_tied else Parameter(model.lm_head.weight.detach().clone())
        self.layers = torch.nn.ModuleList(map(DecoderLayer, inner.layers))
        self.norm = _norm(inner.norm)
        self.eps = inner.norm.variance_epsilon
        self._rotary = inner.rotary_emb
        self._angles: tuple[Tensor, Tensor] | None = None

    def angles(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [tokens, dim / 2], computed once."""
        if self._angles is None or len(self._angles[0]) != tokens.shape[1]:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            both = self._rotary(self.embedding[:1], position_ids=positions)
            self._angles = tuple(one[0, :, : one.shape[-1] // 2].contiguous() for one in both)  # type: ignore[assignment]
        assert self._angles is not None
        return self._angles

    def forward(self, tokens: Tensor) -> Tensor:
        x, added = functional.embedding(tokens, self.embedding), None
        angles = self.angles(tokens)
        for layer in self.layers:
            x, added = layer(x, added, *angles)
        normed, _ = kernels.add_rms_norm(added, x, self.norm, eps=self.eps)
        next_tokens = functional.pad(tokens[:, 1:], (0, 1), value=-100)
        loss: Tensor = kernels.linear_cross_entropy(normed, self.head, next_tokens)
        return loss


def _norm(module: Any) -> Parameter | None:
    """The weight of a norm, as a parameter of its own."""
    return None if module is None else Parameter(module.weight.detach().clone())
