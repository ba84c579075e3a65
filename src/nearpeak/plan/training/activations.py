"""Bytes that one token leaves in memory for the backward pass, by module.

A tensor that a product, a norm or attention needs again counts once. Two kinds of software: fused kernels keep the
inputs of products, queries, keys and values, the output of attention and the two halves of a gated feed; eager code
keeps what stands between them too (`EAGER_BLOCK`, `EAGER_ACTIVATION`). Fused attention keeps no scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from nearpeak.plan.models.model import Model
from nearpeak.plan.training.job import Job, Precision

EAGER_BLOCK = 6.5
"""Bytes per hidden channel that eager code keeps around a mixer or a feed beyond fused kernels: rotated queries and
keys, the float32 input of the norm. Fitted with the next three by `benchmarks/fit_memory.py` on published peaks; what
is too low weighs four times what is too high."""
EAGER_ACTIVATION = 2.0
"""Bytes per intermediate channel: the activated half of a gated feed."""
EAGER_RUNNING = 60.0
"""Bytes per token and hidden channel that the layer that runs makes besides: gathered sequences, gradients."""
EAGER_LOGITS = 7.4
"""Bytes per logit in eager code."""
LOGITS = 6.5
"""Bytes per logit: 16 bits as they come, the float32 copy that the loss works on, and a part of their gradient."""
SCAN_CHUNK = 128
"""Tokens between two saved states of a state-space scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """All that the bytes of a token in a layer depend on."""

    model: Model
    precision: Precision
    eager: bool
    unfused: bool
    sequence: int
    tp: int
    spread: int
    """Ranks that share what lies between blocks."""
    etp: int
    nodes: bool
    """Whether the exchange of experts is hidden behind another microbatch."""
    recompute: tuple[str, ...]


def layer_bytes(job: Job, mixers: str, feeds: str, *, whole: bool = False) -> tuple[Mapping[str, float], float]:
    """Bytes per token of some layers, by module and in all; a recomputed layer leaves its input alone.

    `whole`: as if nothing were recomputed, which is what stands while a layer is computed again.
    """
    layout = job.layout
    spread = layout.tp if layout.sequence_parallel else 1
    recompute = () if whole else layout.recompute
    sequence = job.sequence if job.software == "unfused" else 0
    return _layer_bytes(
        job.model,
        mixers,
        feeds,
        job.precision,
        job.software,
        sequence,
        layout.tp,
        spread,
        layout.etp,
        layout.overlap_experts,
        recompute,
    )


@lru_cache(maxsize=4096)
def _layer_bytes(
    model: Model,
    mixers: str,
    feeds: str,
    precision: Precision,
    software: str,
    sequence: int,
    tp: int,
    spread: int,
    etp: int,
    nodes: bool,
    recompute: tuple[str, ...],
) -> tuple[Mapping[str, float], float]:
    total: dict[str, float] = {}
    if "layer" in recompute:
        total["inputs of layers"] = len(mixers) * 2.0 * model.hidden / spread
        return total, sum(total.values())
    kept = Kept(
        model=model,
        precision=precision,
        eager=software == "eager",
        unfused=software == "unfused",
        sequence=sequence,
        tp=tp,
        spread=spread,
        etp=etp,
        nodes=nodes,
        recompute=recompute,
    )
    for function, letters in ((mixer_bytes, mixers), (feed_bytes, feeds)):
        for kind in sorted(set(letters) - {"-"}):
            for name, value in function(kept, kind).items():
                total[name] = total.get(name, 0.0) + letters.count(kind) * value
    return total, sum(total.values())


def mixer_bytes(kept: Kept, kind: str) -> Mapping[str, float]:
    """Bytes per token of one mixer on one rank, by module."""
    model, tp, saved = kept.model, kept.tp, kept.precision.saved
    parts = _around(kept)
    if kind == "M":
        inner, states = model.ssm_heads * model.ssm_head_dim, 2 * model.ssm_groups * model.ssm_state
        scan = 4.0 * inner * model.ssm_state / SCAN_CHUNK
        parts["state space"] = (2.0 * (2 * inner + states + model.ssm_heads) + 2.0 * (inner + states) + scan) / tp
        parts["output"] = (2.0 + saved) * inner / tp
        return parts
    values, heads = model.heads * model.value_dim, model.heads * model.head_dim
    if model.kv_rank:
        parts["latents"] = (2.0 + saved) * (model.q_rank + model.kv_rank) + 2.0 * model.rope_dim
        parts["queries, keys, values"] = 0.0 if "mla_up" in kept.recompute else 2.0 * (2 * heads + values) / tp
    else:
        parts["queries, keys, values"] = 2.0 * (heads + model.kv_heads * (model.head_dim + model.value_dim)) / tp
    parts["attention"] = (2.0 * values + 4.0 * model.heads) / tp
    if kept.unfused and "attention" not in kept.recompute:
        parts["scores"] = 5.0 * model.heads * kept.sequence / tp  # after the softmax, after dropout, and its mask
    if saved < 2:
        parts["output"] = saved * values / tp  # a copy in the format of the product
    return parts


def feed_bytes(kept: Kept, kind: str) -> Mapping[str, float]:
    """Bytes per token of one feed on one rank, by module."""
    model, saved = kept.model, kept.precision.saved
    parts = _around(kept)
    inner = 2.0 * (2 if model.gated else 1) + (EAGER_ACTIVATION if kept.eager else 0.0)
    inner += 0.0 if "feed_activation" in kept.recompute else saved
    if kind == "D":
        if "feed" not in kept.recompute:
            parts["feed"] = model.intermediate * inner / kept.tp
        return parts
    width, routed = model.latent or model.hidden, model.active_experts / kept.spread
    parts["router"] = 8.0 * model.experts / kept.spread
    if "experts" not in kept.recompute:
        parts["dispatched"] = routed * saved * width
        parts["combined"] = routed * 2.0 * width
        parts["experts"] = routed * model.expert_intermediate * inner / kept.etp
    parts["shared experts"] = model.shared_intermediate * inner / kept.tp
    if kept.nodes:  # attention, dispatch, experts and combine run by themselves, and their outputs stay
        parts["schedule"] = 4 * 2.0 * model.hidden / kept.spread
    if model.latent:
        parts["latents"] = 2.0 * (saved + 2.0) * model.latent / kept.spread
    return parts


def _around(kept: Kept) -> dict[str, float]:
    """The residual and the norm before a block."""
    hidden = kept.model.hidden / kept.spread
    parts = {"residual": 2.0 * hidden, "norm": 0.0 if "norm" in kept.recompute else kept.precision.saved * hidden}
    if kept.eager:
        parts["eager"] = EAGER_BLOCK * hidden
    return parts
