"""How much KV cache fits beside the weights, and what would make it fit where it does not.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> room = cache_room(Deployment.of(model("llama-3-8b"), Cluster.of("h100-sxm x 1")))
>>> room.tokens, round(room.sequences(8192), 1)
(455823, 55.6)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nearpeak.errors import UsageError
from nearpeak.plan.serving.deployment import RESERVED, Deployment
from nearpeak.plan.serving.layout import ServingLayout
from nearpeak.plan.serving.precision import precision, precision_on
from nearpeak.units import GIB

MEMORY_SHARE = 0.92
"""Of a GPU's memory that an engine takes: 0.90 for vLLM by default, 0.90 to 0.95 in published runs of TensorRT-LLM."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRoom:
    """Memory of one GPU of a replica."""

    deployment: Deployment
    memory_bytes: float
    weight_bytes: float
    reserved_bytes: float
    """Context, graphs, buffers, and what the engine leaves alone."""

    @property
    def cache_bytes(self) -> float:
        """What is left for the KV cache; below 0 where the weights do not fit."""
        return self.memory_bytes - self.weight_bytes - self.reserved_bytes

    @property
    def tokens(self) -> int:
        """Tokens of one long sequence's kind that the cache of one attention data parallel group holds."""
        per_token = self.deployment.cache_bytes(1 << 20) / (1 << 20)
        return max(0, int(self.cache_bytes / per_token)) if per_token else 0

    def sequences(self, context: float) -> float:
        """Sequences of `context` tokens that one attention data parallel group holds at once."""
        return max(0.0, self.cache_bytes / self.deployment.cache_bytes(context))


def cache_room(here: Deployment, *, memory_share: float = MEMORY_SHARE) -> CacheRoom:
    """The memory of one GPU, split; never an error: `cache_bytes` is below 0 where the weights do not fit."""
    if not 0 < memory_share <= 1:
        raise UsageError(f"memory_share={memory_share!r} must lie above 0 and at most at 1. Nearest: memory_share=1.0.")
    memory = here.memory_bytes()
    return CacheRoom(
        deployment=here,
        memory_bytes=memory,
        weight_bytes=here.weight_bytes,
        reserved_bytes=RESERVED + (1 - memory_share) * memory,
    )


def require_room(here: Deployment, context: float, *, memory_share: float = MEMORY_SHARE) -> CacheRoom:
    """The room for at least one sequence of `context` tokens; UsageError says what would fit."""
    room = cache_room(here, memory_share=memory_share)
    if room.cache_bytes >= here.cache_bytes(context):
        return room
    if room.cache_bytes <= 0:
        problem = f"its weights take {_gib(room.weight_bytes)} of the {_gib(room.memory_bytes)} of each GPU"
        problem += f", beside {_gib(room.reserved_bytes)} that are not for use"
    else:
        problem = f"{_gib(room.cache_bytes)} are left for the KV cache, and one sequence of {context:.0f} tokens takes "
        problem += _gib(here.cache_bytes(context))
    raise UsageError(
        f"{here.model.name} in {here.precision.name} with {here.layout} does not fit on "
        f"{here.cluster.machine.name}: {problem}. {_remedies(here, context, memory_share)}"
    )


def _remedies(here: Deployment, context: float, memory_share: float) -> str:
    """The cheapest changes that would fit, as a sentence."""
    found = []
    layout = here.layout
    for tp in (2, 4, 8, 16, 32, 64):
        if tp <= layout.tp or (here.model.heads and here.model.heads % tp):
            continue
        wider = ServingLayout(tp=tp, pp=layout.pp, dp=layout.dp, ep=layout.ep)
        if _fits(replace(here, layout=wider), context, memory_share):
            here_too = "" if wider.gpus <= here.cluster.gpus else f" (needs {wider.gpus} GPUs)"
            found.append(f"tp={tp}{here_too}")
            break
    for name in ("fp8", "int8", "fp4", "int4"):
        narrower = precision(name)
        if narrower.weight_bytes >= here.precision.weight_bytes:
            continue
        try:
            narrower = precision_on(here.cluster.machine, here.model, narrower)
        except UsageError:
            continue
        if _fits(replace(here, precision=narrower), context, memory_share):
            found.append(f"precision={name!r}")
            break
    room = cache_room(here, memory_share=memory_share)
    if room.cache_bytes > 0 and room.tokens > 0:
        found.append(f"at most {room.tokens} tokens in one sequence")
    return "What would fit: " + ", or ".join(found) + "." if found else "Nothing up to tp=64 and 4 bits would fit."


def _fits(here: Deployment, context: float, memory_share: float) -> bool:
    return cache_room(here, memory_share=memory_share).cache_bytes >= here.cache_bytes(context)


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
