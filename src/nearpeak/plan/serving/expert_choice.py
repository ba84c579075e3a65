"""Tensor or expert parallel for the experts of a model: what each degree costs in memory, compute and exchange.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> cuts = expert_cuts(model("qwen3-235b-a22b"), Cluster.of("h200-sxm x 8"), "fp8", tokens=64)
>>> [(cut.expert_tp, cut.ep) for cut in cuts if cut.gpus == 8 and cut.attention == "tensor"]
[(8, 1), (4, 2), (2, 4), (1, 8)]
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.plan.models.model import Model
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import Deployment, Links
from nearpeak.plan.serving.experts import busiest, experts_time, layer_communication
from nearpeak.plan.serving.layout import ServingLayout
from nearpeak.plan.serving.rates import rates


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCut:
    """One layer of experts on `gpus` GPUs, cut in one way; seconds."""

    gpus: int
    expert_tp: int
    ep: int
    attention: str
    """How attention beside it is cut: "tensor", or "data" where each GPU has tokens of its own."""
    memory_seconds: float
    """Reading the weights of the experts that are hit, on the busiest GPU."""
    compute_seconds: float
    exchange_seconds: float
    """Bringing tokens to their experts and back, or reducing."""
    seconds: float
    busiest: float
    """Load of the busiest part of the experts against the mean."""

    @property
    def limiter(self) -> str:
        """What takes longest."""
        parts = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "exchange": self.exchange_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def expert_cuts(
    model: Model,
    cluster: Cluster,
    precision: str = "bf16",
    *,
    tokens: float,
    engine: str = "vllm",
    constants: ServingConstants | None = None,
) -> tuple[ExpertCut, ...]:
    """Every way to cut one layer of experts over 1, 2, 4 ... GPUs of `cluster`, `tokens` tokens in all per step.

    With tensor parallel attention every GPU has all tokens, and a cut ends in one reduction whatever it is. With data
    parallel attention each GPU has its share of the tokens, and they travel.
    """
    if not model.is_moe:
        raise UsageError(f"{model.name} has no experts to cut. Name a model with experts.")
    if not tokens > 0:
        raise UsageError(f"tokens={tokens!r} must be above 0. Nearest: tokens=1.")
    constants = constants or load_serving_constants()
    found = []
    links = Links(cluster)
    gpus = 1
    while gpus <= cluster.gpus:
        for attention in ("tensor", "data") if gpus > 1 else ("tensor",):
            for ep in (n for n in range(1, gpus + 1) if gpus % n == 0 and model.experts % n == 0):
                if attention == "tensor" and model.heads % gpus:
                    continue
                layout = ServingLayout(tp=gpus, ep=ep) if attention == "tensor" else ServingLayout(tp=1, dp=gpus, ep=ep)
                here = Deployment.of(model, cluster, layout, precision, engine=engine, links=links)
                found.append(_cut(here, attention, tokens, constants))
        gpus *= 2
    return tuple(found)


def _cut(here: Deployment, attention: str, tokens: float, constants: ServingConstants) -> ExpertCut:
    layout = here.layout
    own = constants.engines[here.engine].collective
    each = tokens / layout.dp
    seconds, memory, compute = experts_time(here, constants, rates(here, constants), each)
    sent = layer_communication(here, own, "-", "E", each)
    return ExpertCut(
        gpus=layout.gpus,
        expert_tp=layout.expert_tp_used,
        ep=layout.ep,
        attention=attention,
        memory_seconds=memory,
        compute_seconds=compute,
        exchange_seconds=sent,
        seconds=seconds + sent,
        busiest=busiest(tokens, here.model, layout.ep, constants.skew),
    )


def fastest_cut(cuts: tuple[ExpertCut, ...], gpus: int) -> tuple[ExpertCut, str]:
    """The fastest cut over `gpus` GPUs, and why it beats the best one of the other kind."""
    here = [cut for cut in cuts if cut.gpus == gpus]
    if not here:
        raise UsageError(f"gpus={gpus} was not looked at. Valid: {', '.join(str(n) for n in {c.gpus for c in cuts})}.")
    best = min(here, key=lambda cut: cut.seconds)
    others = [cut for cut in here if (cut.ep > 1) != (best.ep > 1)]
    if not others:
        return best, "there is no other way to cut it"
    other = min(others, key=lambda cut: cut.seconds)
    gains = {
        "reads for a shorter time": other.memory_seconds - best.memory_seconds,
        "multiplies for a shorter time": other.compute_seconds - best.compute_seconds,
        "exchanges for a shorter time": other.exchange_seconds - best.exchange_seconds,
    }
    why = max(gains, key=lambda name: gains[name])
    kinds = ("expert parallel", "tensor parallel") if best.ep > 1 else ("tensor parallel", "expert parallel")
    return best, (
        f"{kinds[0]} takes {best.seconds * 1e6:.0f} us a layer and {kinds[1]} {other.seconds * 1e6:.0f}: it {why} "
        f"({gains[why] * 1e6:+.0f} us)"
    )
