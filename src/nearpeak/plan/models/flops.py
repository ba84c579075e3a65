"""Model FLOPs by the one convention of nearpeak: a multiply-add is 2, causal attention counts what the mask leaves.

Matrix products and attention alone: what else a layer does is bound by memory. A token of a sequence of `sequence`
tokens, averaged over the sequence. Recomputation is no model FLOP.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.plan.models.model import Model
from nearpeak.plan.models.parameters import attention_matrices, state_space_matrices

BACKWARD_PRODUCTS = 2.0
"""A product's backward pass is two products."""
BACKWARD_ATTENTION = 2.5
"""That of fused attention is five to the forward pass's two: the scores are computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Forward FLOPs of one token, all layers together."""

    attention_products: float
    scores: float
    """Queries times keys, and probabilities times values."""
    state_space_products: float
    scan: float
    dense: float
    experts: float
    shared: float
    """Shared experts, latent projections and routers."""
    output: float
    embedding: float
    """The patches of a vision model; a table costs nothing."""

    @property
    def products(self) -> float:
        """All but attention's scores and the scan."""
        return self.total - self.scores - self.scan

    @property
    def total(self) -> float:
        """One token, forward."""
        return (
            self.attention_products
            + self.scores
            + self.state_space_products
            + self.scan
            + self.dense
            + self.experts
            + self.shared
            + self.output
            + self.embedding
        )

    @property
    def training(self) -> float:
        """Forward and backward by the usual convention, three times forward: recomputed scores do not count."""
        return 3 * self.total

    @property
    def training_done(self) -> float:
        """What fused kernels really do forward and backward: the scores are computed again in the backward pass."""
        forward = self.scores + self.scan
        return 3 * self.products + (1 + BACKWARD_ATTENTION) * forward


def forward_flops(model: Model, sequence: int) -> Flops:
    """What one token costs forward, on the average over a sequence."""
    matrices = attention_matrices(model) if model.heads else []
    projections = sum(2.0 * inputs * outputs for _, inputs, outputs in matrices)
    spaces = sum(2.0 * inputs * outputs for _, inputs, outputs in state_space_matrices(model))
    feed = 2.0 * (3 if model.gated else 2)
    expert_layers = model.feeds.count("E")
    inner = model.latent or model.hidden
    shared = feed * model.hidden * model.shared_intermediate + 4.0 * model.latent * model.hidden
    shared += 2.0 * model.hidden * (model.experts + model.shared_gate)
    output_share = 1.0 if not model.image_tokens else 1.0 / model.image_tokens
    return Flops(
        attention_products=model.attention_layers * projections,
        scores=sum(model.mixers.count(kind) * score_flops(model, kind, sequence) for kind in "AWC"),
        state_space_products=model.mixers.count("M") * spaces,
        scan=model.mixers.count("M") * scan_flops(model),
        dense=model.feeds.count("D") * feed * model.hidden * model.intermediate,
        experts=expert_layers * model.active_experts * feed * inner * model.expert_intermediate,
        shared=expert_layers * shared,
        output=2.0 * model.hidden * model.vocabulary * output_share,
        embedding=2.0 * model.patch_values * model.hidden * (1 - output_share) if model.patch_values else 0.0,
    )


def keys_seen(model: Model, kind: str, sequence: int) -> float:
    """How many keys a token of a sequence sees on the average in a layer of this kind."""
    if not model.causal:
        return float(sequence)
    if kind == "A" or not model.window or sequence <= model.window:
        return (sequence + 1) / 2
    if kind == "W":
        window = model.window
        return (window * (window + 1) / 2 + (sequence - window) * window) / sequence
    whole, rest = divmod(sequence, model.window)
    return (whole * model.window * (model.window + 1) / 2 + rest * (rest + 1) / 2) / sequence


def score_flops(model: Model, kind: str, sequence: int) -> float:
    """FLOPs of attention itself, for one token in one layer of this kind."""
    return 2.0 * model.heads * (model.head_dim + model.value_dim) * keys_seen(model, kind, sequence)


def scan_flops(model: Model) -> float:
    """FLOPs of the chunked state-space scan for one token in one layer, with chunks of 256 (Mamba-2's kernel)."""
    if not model.ssm_heads:
        return 0.0
    chunk = 256
    inside = chunk / 2 * (model.ssm_groups * model.ssm_state + model.ssm_heads * model.ssm_head_dim)
    across = 2 * model.ssm_heads * model.ssm_head_dim * model.ssm_state
    return 2.0 * (inside + across)


def kv_bytes_per_token(model: Model, bytes_per_value: float = 2.0, *, layers: str = "AWC") -> float:
    """Bytes that one token leaves in the KV cache, over all attention layers of the given kinds.

    Latent attention keeps the compressed vector and the rotary key, whatever the number of heads. Layers with a window
    stop growing at its length: ask for the kinds apart, `layers="A"` and `layers="W"`.
    """
    count = sum(model.mixers.count(kind) for kind in layers)
    values = model.kv_rank + model.rope_dim if model.kv_rank else model.kv_heads * (model.head_dim + model.value_dim)
    return count * values * bytes_per_value
