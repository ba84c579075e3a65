"""`Deployment`: a model on a cluster under a serving layout, a precision and an engine; and its memory.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> here = Deployment.of(model("llama-3-70b"), Cluster.of("h100-sxm x 8"), ServingLayout(tp=4), "fp8")
>>> round(here.weight_bytes / 1e9, 1), round(here.cache_bytes(8192) / 1e9, 2)
(18.2, 0.34)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.models.model import Model
from nearpeak.plan.models.parameters import count
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.network.collectives import Collective, collective_seconds
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ENGINES
from nearpeak.plan.serving.layout import ServingLayout
from nearpeak.plan.serving.precision import Precision, precision, precision_on
from nearpeak.units import GIB

RESERVED = 3.0 * GIB
"""CUDA context, graphs, communication buffers, activations of a step, per GPU. Assumed: engines report 2 to 5 GiB."""


class Links:
    """Times of the collectives of one cluster, remembered."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._provenances: dict[tuple[int, int], Provenance] = {}
        self._known: dict[tuple[str, float, int, int], Collective] = {}

    def __call__(self, op: str, bytes: float, ranks: int, stride: int = 1) -> Collective:
        """`op` over `ranks` GPUs that lie `stride` apart."""
        key = (op, bytes, ranks, stride)
        known = self._known.get(key)
        if known is None:
            group = self.cluster.group(ranks, stride)
            known = self._known[key] = collective_seconds(
                op,
                bytes,
                ranks,
                self.cluster,
                ranks_per_node=group.ranks_per_domain,
                concurrent_groups=group.concurrent_groups,
            )
            before = self._provenances.get((ranks, stride), known.provenance)
            self._provenances[ranks, stride] = weakest(before, known.provenance)
        return known

    def provenance(self, layout: ServingLayout) -> tuple[Provenance, ...]:
        """Where the times between the GPUs of `layout` come from, as far as they were asked for."""
        groups = ((layout.tp, 1), (layout.dp, layout.tp), (2, layout.stage_gpus if layout.pp > 1 else 0))
        return tuple(self._provenances[group] for group in groups if group in self._provenances)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deployment:
    """One replica. `Deployment.of` builds and checks one."""

    model: Model
    cluster: Cluster
    layout: ServingLayout
    precision: Precision
    engine: str
    graphs: bool
    """Whether steps without a prompt are launched as one graph."""
    links: Links = field(repr=False)

    @staticmethod
    def of(
        model: Model,
        cluster: Cluster,
        layout: ServingLayout | None = None,
        precision_name: str | Precision = "bf16",
        *,
        kv: str | None = None,
        engine: str = "vllm",
        graphs: bool = True,
        links: Links | None = None,
    ) -> Deployment:
        """A replica of `model` that takes the first GPUs of `cluster`; UsageError names what is wrong.

        A search passes `links` from one deployment on `cluster` to the next, which then remember each other's times.
        """
        layout = layout or ServingLayout(tp=1)
        layout.check(model, cluster.gpus)
        if engine not in ENGINES:
            raise UsageError(f"engine={engine!r} is not known. {did_you_mean(engine, ENGINES)}")
        if not model.causal:
            raise UsageError(f"{model.name} is not causal: it has no prefill and no decode to plan.")
        chosen = precision(precision_name, kv=kv) if isinstance(precision_name, str) else precision_name
        return Deployment(
            model=model,
            cluster=cluster,
            layout=layout,
            precision=precision_on(cluster.machine, model, chosen),
            engine=engine,
            graphs=graphs,
            links=links or Links(cluster),
        )

    @property
    def weight_bytes(self) -> float:
        """Of one GPU of the fullest stage: its share of the layers, the embedding and the output layer."""
        model, layout = self.model, self.layout
        numbers = count(model)
        experts = numbers.experts_of(model)
        tables = numbers.embedding + (numbers.output or 0)
        rest = numbers.total - experts - tables
        held = rest * self.precision.rest_bytes / layout.tp
        held += experts * self.precision.weight_bytes / layout.stage_gpus
        return held / layout.pp + tables * 2.0 / layout.tp

    def cache_values(self) -> float:
        """Values of the KV cache that one token leaves on one GPU in one attention layer."""
        model = self.model
        if model.kv_rank:
            return model.kv_rank + model.rope_dim
        return math.ceil(model.kv_heads / self.layout.tp) * (model.head_dim + model.value_dim)

    def cache_bytes(self, context: float) -> float:
        """Of the cache of one sequence of `context` tokens on one GPU; layers with a window keep no more than that."""
        model, held = self.model, self.cache_values() * self.precision.kv_bytes
        tokens = 0.0
        for kind in "AWC":
            layers = model.mixers.count(kind)
            tokens += layers * (context if kind == "A" else min(context, model.window))
        state = model.mixers.count("M") * model.ssm_heads * model.ssm_head_dim * model.ssm_state * 4.0
        return (tokens * held + state / self.layout.tp) / self.layout.pp

    def memory_bytes(self) -> float:
        """Of one GPU."""
        memory = self.cluster.machine.memory_bytes
        if memory is None:
            raise UsageError(f"{self.cluster.machine.name}: its memory is not known. Calibrate it, or give a machine.")
        return memory
