"""Exact parameter counts of a `Model`: in all, per token, by kind of layer.

>>> from nearpeak.plan.models.catalogue import model
>>> count(model("llama-2-7b")).total
6738415616
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nearpeak.plan.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How many weights a model has, and where."""

    total: int
    active: int
    """Those that one token meets: of the routed experts only the chosen ones."""
    embedding: int
    """The table of tokens and that of positions."""
    output: int
    """The output layer; 0 where it is tied to the embedding."""
    final_norm: int
    attention: int
    """One attention layer, without its norms."""
    state_space: int
    """One state-space layer, without its norms."""
    dense: int
    """One dense feed, without its norms."""
    expert: int
    """One routed expert."""
    expert_shared: int
    """What else an expert layer has: the router, shared experts, latent projections; without its norms."""
    norm: int
    """The norms of one mixer or of one feed."""

    def experts_of(self, model: Model) -> int:
        """All routed experts of all layers."""
        return model.feeds.count("E") * model.experts * self.expert


@lru_cache(maxsize=1024)
def count(model: Model) -> Parameters:
    """The weights of `model`."""
    norm = model.norms_per_block * model.norm_width * model.hidden
    attention, state_space = attention_weights(model), state_space_weights(model)
    dense = feed_weights(model.hidden, model.intermediate, model.gated, model.feed_bias)
    inner = model.latent or model.hidden
    expert = feed_weights(inner, model.expert_intermediate, model.gated, model.expert_bias)
    router = model.hidden * model.experts + (model.experts if model.router_bias else 0)
    shared = feed_weights(model.hidden, model.shared_intermediate, model.gated, model.expert_bias)
    latent = 2 * model.latent * model.hidden
    expert_shared = router + shared + latent + (model.hidden if model.shared_gate else 0)
    embedding = model.vocabulary * model.hidden
    if model.patch_values:
        embedding = (model.patch_values + 1) * model.hidden + model.hidden  # a bias, and the class token
    embedding += model.positions * model.hidden
    output = 0 if model.tied else model.vocabulary * model.hidden
    output += model.vocabulary if model.output_layer_bias else 0
    final_norm = model.norm_width * model.hidden if model.final_norm else 0
    blocks = sum(letter != "-" for letter in model.mixers + model.feeds)
    expert_layers = model.feeds.count("E")
    rest = (
        embedding
        + output
        + final_norm
        + blocks * norm
        + model.attention_layers * attention
        + model.mixers.count("M") * state_space
        + model.feeds.count("D") * dense
        + expert_layers * expert_shared
    )
    return Parameters(
        total=rest + expert_layers * model.experts * expert,
        active=rest + expert_layers * model.active_experts * expert,
        embedding=embedding,
        output=output,
        final_norm=final_norm,
        attention=attention,
        state_space=state_space,
        dense=dense,
        expert=expert,
        expert_shared=expert_shared,
        norm=norm,
    )


def attention_matrices(model: Model) -> list[tuple[str, int, int]]:
    """The products of one attention layer: name, inputs and outputs of each."""
    queries, values = model.heads * model.head_dim, model.heads * model.value_dim
    if not model.kv_rank:
        keys = model.kv_heads * (model.head_dim + model.value_dim)
        return [("qkv", model.hidden, queries + keys), ("output", values, model.hidden)]
    down = [("q down", model.hidden, model.q_rank), ("q up", model.q_rank, queries)]
    if not model.q_rank:
        down = [("q", model.hidden, queries)]
    return [
        *down,
        ("kv down", model.hidden, model.kv_rank + model.rope_dim),
        ("kv up", model.kv_rank, model.heads * (model.head_dim - model.rope_dim + model.value_dim)),
        ("output", values, model.hidden),
    ]


def attention_weights(model: Model) -> int:
    """Weights of one attention layer, without the norms around it."""
    if not model.heads:
        return 0
    matrices = attention_matrices(model)
    weights = sum(inputs * outputs for _, inputs, outputs in matrices)
    if model.qkv_bias:
        weights += sum(outputs for name, _, outputs in matrices if name in ("qkv", "q", "q down", "kv down"))
    weights += model.hidden if model.output_bias else 0
    weights += model.q_rank + model.kv_rank  # the norms of the compressed queries, keys and values
    return weights + model.qk_norm + (model.heads if model.sinks else 0)


def state_space_matrices(model: Model) -> list[tuple[str, int, int]]:
    """The products of one Mamba-2 layer: the joint projection of gate, inputs, B, C and steps; and the output."""
    inner = model.ssm_heads * model.ssm_head_dim
    joint = 2 * inner + 2 * model.ssm_groups * model.ssm_state + model.ssm_heads
    return [("in", model.hidden, joint), ("out", inner, model.hidden)]


def state_space_weights(model: Model) -> int:
    """Weights of one Mamba-2 layer: products, convolution with bias, A, D, the steps' bias, and the gated norm."""
    if not model.ssm_heads:
        return 0
    inner = model.ssm_heads * model.ssm_head_dim
    channels = inner + 2 * model.ssm_groups * model.ssm_state
    matrices = sum(inputs * outputs for _, inputs, outputs in state_space_matrices(model))
    return matrices + channels * (model.ssm_kernel + 1) + 3 * model.ssm_heads + inner


def feed_weights(hidden: int, intermediate: int, gated: bool, bias: bool) -> int:
    """Weights of one feed; a gated one has two matrices up."""
    ups = 2 if gated else 1
    weights = (ups + 1) * hidden * intermediate
    return weights + (ups * intermediate + hidden if bias and intermediate else 0)
