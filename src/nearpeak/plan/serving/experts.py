"""Experts and exchange of a served model: which experts a batch visits, how long they take, what GPUs send others."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

from nearpeak.plan.models.model import Model
from nearpeak.plan.models.parameters import count
from nearpeak.plan.serving.constants import ServingConstants
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.rates import Rates, norm

OWN_KERNEL_BYTES = 2.0**21
"""Message size at which engines go over from their own all-reduce to NCCL's."""


def experts_hit(model: Model, tokens: float, variety: float = 1.0) -> float:
    """How many of a layer's experts at least one of `tokens` tokens visits.

    With a `variety` of 1 all experts are as likely for every token. Real tokens are alike, and so are their experts:
    a batch counts as `tokens ** variety` independent ones.
    """
    if model.active_experts >= model.experts:
        return float(model.experts)
    independent = tokens**variety if tokens > 1 else tokens
    return float(model.experts * -math.expm1(independent * math.log1p(-model.active_experts / model.experts)))


def busiest(tokens: float, model: Model, parts: int, skew: float) -> float:
    """Load of the busiest of `parts` parts of the experts against the mean: chance, and lasting skew."""
    if parts == 1:
        return 1.0
    mean = max(tokens * model.active_experts / parts, 1e-9)
    return min(float(parts), 1.0 + largest_of(parts) / math.sqrt(mean) + skew * (1 - 1 / parts))


@cache
def largest_of(parts: int) -> float:
    """How many standard deviations the largest of `parts` equal chances lies above the mean (Blom)."""
    return NormalDist().inv_cdf((parts - 0.375) / (parts + 0.25)) if parts > 1 else 0.0


def experts_time(
    here: Deployment, constants: ServingConstants, reached: Rates, tokens: float
) -> tuple[float, float, float]:
    model, layout, chosen = here.model, here.layout, here.precision
    everywhere = tokens * layout.dp
    share = experts_hit(model, everywhere, constants.variety) / model.experts
    here_too = model.experts / layout.ep
    hit = here_too * share  # and on the GPU that happens to have most, which the others wait for:
    hit = min(here_too, hit + largest_of(layout.ep) * math.sqrt(hit * (1.0 - share)))
    visits = everywhere * model.active_experts / layout.ep
    if layout.ep > 1:
        visits *= busiest(everywhere, model, layout.ep, constants.skew)
    weights = count(model).expert / layout.expert_tp_used
    inner = model.latent or model.hidden
    moved = hit * weights * chosen.weight_bytes
    moved += visits * (
        inner * (chosen.activation_bytes + 2.0) + 3.0 * model.expert_intermediate / layout.expert_tp_used
    )
    memory = moved / reached.expert_stream
    width = model.expert_intermediate / layout.expert_tp_used
    narrow = width / (width + constants.expert_width)
    compute = 2.0 * (visits + constants.expert_rows * hit) * weights / (reached.expert_compute * narrow)
    return norm(memory, compute), memory, compute


def link_seconds(here: Deployment, own: float, op: str, bytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of a collective, where `own` is the latency of the engine's own kernels against NCCL's."""
    found = here.links(op, max(bytes, 1.0), ranks, stride)
    share = own + (1.0 - own) * bytes / (bytes + OWN_KERNEL_BYTES)
    return found.bandwidth_seconds + share * found.latency_seconds


def layer_communication(here: Deployment, own: float, mixer: str, feed: str, tokens: float) -> float:
    layout, hidden = here.layout, here.model.hidden
    size = tokens * hidden * 2.0
    reductions = 0
    if layout.tp > 1:
        reductions = (mixer != "-") + (feed == "D" or (feed == "E" and layout.dp == 1))
    seconds = reductions * link_seconds(here, own, "all_reduce", size, layout.tp) if reductions else 0.0
    if feed == "E" and layout.dp > 1:
        seconds += exchange(here, own, tokens)
    return seconds


def exchange(here: Deployment, own: float, tokens: float) -> float:
    """Seconds to bring tokens to their experts and back, between attention data parallel groups.

    The better of two ways: every group gets all tokens (all-gather, reduce-scatter), or each token goes to the parts
    that hold its experts (all-to-all, twice).
    """
    model, layout = here.model, here.layout
    stride, width = layout.tp, here.model.latent or here.model.hidden
    there = tokens * width * min(2.0, here.precision.activation_bytes)
    back = tokens * width * 2.0
    gathered = link_seconds(here, own, "all_gather", there * layout.dp, layout.dp, stride)
    gathered += link_seconds(here, own, "reduce_scatter", back * layout.dp, layout.dp, stride)
    if layout.ep == 1:
        return gathered
    parts = min(layout.ep, layout.dp)
    copies = parts * (1.0 - (1.0 - 1.0 / parts) ** model.active_experts)
    sent = link_seconds(here, own, "all_to_all", there * copies, layout.dp, stride)
    sent += link_seconds(here, own, "all_to_all", back * copies, layout.dp, stride)
    return min(gathered, sent)
