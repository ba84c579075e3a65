"""`Deployment`: a model on a cluster under a serving layout, a precision and an engine; its memory and KV cache.

Attention and experts share the GPUs of a pipeline stage and cut them in two ways: attention into `dp` data parallel
groups of `tp`, experts into `ep` parts of the experts, each cut `expert_tp` ways (`ServingLayout`).

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> llama = Deployment.of(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), ServingLayout(tp=4), "fp8")
>>> round(llama.weight_bytes / 1e9, 1), round(llama.cache_bytes(8192) / 1e9, 2)
(18.2, 0.34)
>>> serving_precision("fp8").weight_bytes, serving_precision("int4").compute
(1.0, 'bfloat16')
>>> room = cache_room(Deployment.of(get_model("llama-3-8b"), Cluster.of("h100-sxm x 1")))
>>> room.tokens, round(room.sequences(8192), 1)
(453166, 55.3)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.machines.machine import Machine
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import CollectiveTimes
from nearpeak.plan.legal import nearest_divisor, require_positive
from nearpeak.plan.models.model import Model, count_parameters
from nearpeak.plan.serving.constants import ENGINES
from nearpeak.units import GIB

_NO_DEGREES = ("redundant", "overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """Degrees of parallelism of one replica."""

    tp: int = 1
    """Tensor parallelism of attention and dense layers."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Attention data parallel groups in one stage, each with its own requests and KV cache."""
    ep: int = 1
    """Expert parallelism."""
    expert_tp: int | None = None
    """Tensor parallelism inside an expert; None: the GPUs that `ep` leaves."""
    redundant: int = 0
    """Copies of busy experts beyond the model's own, in each layer: they even out the load, and let `ep` be a number
    that does not divide the experts."""
    overlap: bool = False
    """Whether a step is two half batches: the exchange of one passes while the other is computed."""

    def __post_init__(self) -> None:
        degrees = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NO_DEGREES}
        if self.redundant < 0:
            raise UsageError(f"redundant={self.redundant} must be 0 or more. Nearest: redundant=0.")
        require_positive(**{name: value for name, value in degrees.items() if value is not None})
        if self.stage_gpus % self.ep:
            near = nearest_divisor(self.ep, self.stage_gpus)
            raise UsageError(
                f"ep={self.ep} does not divide the tp x dp = {self.stage_gpus} GPUs of a stage. Nearest: ep={near}."
            )
        if self.expert_tp is not None and self.expert_tp * self.ep != self.stage_gpus:
            raise UsageError(
                f"ep x expert_tp = {self.ep * self.expert_tp} and tp x dp = {self.stage_gpus} differ, and both are the "
                f"GPUs of a stage. Nearest: expert_tp={self.stage_gpus // self.ep}."
            )

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage."""
        return self.tp * self.dp

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.stage_gpus * self.pp

    @property
    def expert_tp_used(self) -> int:
        """GPUs that share one expert."""
        return self.stage_gpus // self.ep

    def check(self, model: Model, gpus: int) -> None:
        """Raise UsageError where this layout cannot run `model` or needs more than `gpus` GPUs."""
        if self.gpus > gpus:
            raise UsageError(
                f"tp x dp x pp = {self.gpus} is larger than the cluster of {gpus} GPUs. Nearest: gpus={self.gpus}."
            )
        if model.heads and model.heads % self.tp:
            raise UsageError(
                f"tp={self.tp} does not divide the {model.heads} heads of {model.name}. "
                f"Nearest: tp={nearest_divisor(self.tp, model.heads)}."
            )
        if self.pp > model.layers:
            raise UsageError(
                f"pp={self.pp} is more than the {model.layers} layers of {model.name}. Nearest: pp={model.layers}."
            )
        if not model.is_moe:
            for name, without in (("ep", 1), ("redundant", 0), ("overlap", False)):
                if getattr(self, name) > without:
                    given = f"{name}={getattr(self, name)}"
                    raise UsageError(f"{given}: {model.name} has no experts. Nearest: {name}={without}.")
            return
        if (model.experts + self.redundant) % self.ep:
            copies = f" and {self.redundant} redundant ones" if self.redundant else ""
            raise UsageError(
                f"ep={self.ep} does not divide the {model.experts} experts of {model.name}{copies}. "
                f"Nearest: ep={nearest_divisor(self.ep, model.experts + self.redundant)}, or "
                f"redundant={-model.experts % self.ep} experts that GPUs have twice."
            )

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"]
        parts += [f"{name} {value}" for name, value in (("dp", self.dp), ("ep", self.ep), ("pp", self.pp)) if value > 1]
        parts += [f"{self.redundant} redundant experts"] if self.redundant else []
        parts += ["two overlapped batches"] if self.overlap else []
        return ", ".join(parts)


KV_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class ServingPrecision:
    """Number formats of a served model."""

    name: str
    weight_bytes: float
    """Of one weight of a quantized matrix, its scales included."""
    compute: str
    """dtype of GEMMs."""
    activation_bytes: float
    """Bytes of one input value of a GEMM."""
    kv_bytes: float
    rest_bytes: float
    """Bytes of one weight outside of the experts."""
    rest_compute: str
    weight_only: bool = False
    """Whether only weights are quantized: they are converted to `compute` before GEMMs."""


_PRECISIONS: Mapping[str, ServingPrecision] = {
    item.name: item
    for item in (
        ServingPrecision("bf16", 2.0, "bfloat16", 2.0, 2.0, 2.0, "bfloat16"),
        ServingPrecision("fp8", 1.0, "float8", 1.0, 1.0, 1.0, "float8"),
        # blocks of 16 with a scale of 8 bits
        ServingPrecision("fp4", 0.5625, "float4", 0.5625, 1.0, 0.5625, "float4"),
        ServingPrecision("int8", 1.0, "bfloat16", 2.0, 2.0, 1.0, "bfloat16", weight_only=True),
        # groups of 32 with a scale and a zero point of 16 bits each
        ServingPrecision("int4", 0.625, "bfloat16", 2.0, 2.0, 0.625, "bfloat16", weight_only=True),
    )
}
_ALIASES = {"bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "float8": "fp8", "float4": "fp4", "nvfp4": "fp4"}
_ALIASES |= {"mxfp4": "fp4", "int4-g32": "int4"}


def serving_precision(name: str, *, kv: str | None = None) -> ServingPrecision:
    """The precision of this name; `kv` is the format of the KV cache ("bf16", "fp8")."""
    precision = _PRECISIONS.get(_ALIASES.get(name, name))
    if precision is None:
        raise UsageError(f"precision={name!r} is not known. {did_you_mean(name, _PRECISIONS)}")
    if kv is None:
        return precision
    if kv not in KV_BYTES:
        raise UsageError(f"kv={kv!r} is not a precision of the KV cache. {did_you_mean(kv, KV_BYTES)}")
    return replace(precision, kv_bytes=KV_BYTES[kv])


def precision_on_machine(machine: Machine, model: Model, chosen: ServingPrecision) -> ServingPrecision:
    """`chosen` as it runs on `machine` for `model`; UsageError where the machine does not support it.

    Published checkpoints in 4 bits of models with latent attention or attention sinks (DeepSeek, GPT-OSS) hold only
    their experts in 4 bits. On machines without 4-bit GEMMs, engines convert such weights to 16 bits.
    """
    matrix = machine.theoretical.matrix if machine.theoretical is not None else {}
    if chosen.compute == "float4":
        if model.is_moe and (model.kv_rank or model.sinks):
            chosen = replace(chosen, rest_bytes=2.0, rest_compute="bfloat16")
        if "float4" not in matrix:
            chosen = replace(chosen, compute="bfloat16", activation_bytes=2.0, weight_only=True)
            if chosen.rest_compute == "float4":
                chosen = replace(chosen, rest_compute="bfloat16")
    for dtype in (chosen.compute, chosen.rest_compute):
        if matrix and dtype not in matrix:
            valid = [name for name, item in _PRECISIONS.items() if item.compute in matrix]
            nearest = f" It has {', '.join(matrix)}."
            if valid:
                nearest = f" Nearest: {'int8' if 'int8' in valid else valid[0]}; it can run {', '.join(valid)}."
            raise UsageError(f"precision={chosen.name!r}: {machine.name} has no {dtype} products.{nearest}")
    return chosen


RESERVED_BYTES = 3.0 * GIB
"""CUDA context, graphs, communication buffers, activations of a step, per GPU. Assumed: engines report 2 to 5 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deployment:
    """One replica. `Deployment.of` builds and checks one."""

    model: Model
    cluster: Cluster
    layout: ServingLayout
    precision: ServingPrecision
    engine: str
    graphs: bool
    """Whether steps without a prompt are CUDA graphs."""
    collectives: CollectiveTimes = field(repr=False)

    @staticmethod
    def of(
        model: Model,
        cluster: Cluster,
        layout: ServingLayout | None = None,
        precision_name: str | ServingPrecision = "bf16",
        *,
        kv: str | None = None,
        engine: str = "vllm",
        graphs: bool = True,
        collectives: CollectiveTimes | None = None,
    ) -> Deployment:
        """A replica of `model` on the first GPUs of `cluster`; UsageError names the invalid field.

        A search passes `collectives` from one deployment on `cluster` to the next, so that times are computed once.
        """
        layout = layout or ServingLayout(tp=1)
        layout.check(model, cluster.gpus)
        if engine not in ENGINES:
            raise UsageError(f"engine={engine!r} is not known. {did_you_mean(engine, ENGINES)}")
        if not model.causal:
            raise UsageError(f"{model.name} is not causal: it has no prefill and no decode to plan.")
        chosen = serving_precision(precision_name, kv=kv) if isinstance(precision_name, str) else precision_name
        return Deployment(
            model=model,
            cluster=cluster,
            layout=layout,
            precision=precision_on_machine(cluster.machine, model, chosen),
            engine=engine,
            graphs=graphs,
            collectives=collectives or CollectiveTimes(cluster),
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one GPU of the fullest stage: layers, embedding and output layer."""
        model, layout = self.model, self.layout
        numbers = count_parameters(model)
        experts = numbers.experts_of(model)
        tables = numbers.embedding + (numbers.output or 0)
        rest = numbers.total - experts - tables
        held = rest * self.precision.rest_bytes / layout.tp
        copies = 1 + layout.redundant / model.experts if model.experts else 1.0
        held += experts * copies * self.precision.weight_bytes / layout.stage_gpus
        return held / layout.pp + tables * 2.0 / layout.tp

    def cache_values(self) -> float:
        """Values of one token in the KV cache of one attention layer on one GPU."""
        model = self.model
        if model.kv_rank:
            return model.kv_rank + model.rope_dim
        return math.ceil(model.kv_heads / self.layout.tp) * (model.head_dim + model.value_dim)

    def cache_bytes(self, context: float) -> float:
        """Bytes of the cache of one sequence of `context` tokens on one GPU; windowed layers store the window."""
        model, held = self.model, self.cache_values() * self.precision.kv_bytes
        tokens = 0.0
        for kind in "AWC":
            layers = model.mixers.count(kind)
            tokens += layers * (context if kind == "A" else min(context, model.window))
        state = model.mixers.count("M") * model.ssm_heads * model.ssm_head_dim * model.ssm_state * 4.0
        return (tokens * held + state / self.layout.tp) / self.layout.pp

    def memory_bytes(self) -> float:
        """Memory of one GPU."""
        memory = self.cluster.machine.memory_bytes
        if memory is None:
            raise UsageError(f"{self.cluster.machine.name}: its memory is not known. Calibrate it, or give a machine.")
        return memory


MEMORY_SHARE = 0.92
"""Share of memory that an engine uses: 0.90 is vLLM's default, 0.90 to 0.95 are in published runs of TensorRT-LLM."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRoom:
    """Memory of one GPU of a replica."""

    deployment: Deployment
    memory_bytes: float
    weight_bytes: float
    reserved_bytes: float
    """CUDA context, graphs, buffers, and memory that the engine does not use."""

    @property
    def cache_bytes(self) -> float:
        """Memory for the KV cache; negative where the weights do not fit."""
        return self.memory_bytes - self.weight_bytes - self.reserved_bytes

    @property
    def tokens(self) -> int:
        """Capacity of one attention data parallel group in tokens of long sequences."""
        per_token = self.deployment.cache_bytes(1 << 20) / (1 << 20)
        return max(0, int(self.cache_bytes / per_token)) if per_token else 0

    def sequences(self, context: float) -> float:
        """Capacity of one attention data parallel group in sequences of `context` tokens."""
        return max(0.0, self.cache_bytes / self.deployment.cache_bytes(context))


def cache_room(deployment: Deployment, *, memory_share: float = MEMORY_SHARE) -> CacheRoom:
    """The memory of one GPU by use. `cache_bytes` is negative where the weights do not fit; no error is raised."""
    if not 0 < memory_share <= 1:
        raise UsageError(f"memory_share={memory_share!r} must lie above 0 and at most at 1. Nearest: memory_share=1.0.")
    memory = deployment.memory_bytes()
    return CacheRoom(
        deployment=deployment,
        memory_bytes=memory,
        weight_bytes=deployment.weight_bytes,
        reserved_bytes=RESERVED_BYTES + (1 - memory_share) * memory,
    )


def require_room(deployment: Deployment, context: float, *, memory_share: float = MEMORY_SHARE) -> CacheRoom:
    """The memory of one GPU by use; UsageError where one sequence of `context` tokens does not fit lists what would."""
    room = cache_room(deployment, memory_share=memory_share)
    if room.cache_bytes >= deployment.cache_bytes(context):
        return room
    if room.cache_bytes <= 0:
        problem = f"its weights take {_gib(room.weight_bytes)} of the {_gib(room.memory_bytes)} of each GPU"
        problem += f", beside {_gib(room.reserved_bytes)} that are not for use"
    else:
        problem = f"{_gib(room.cache_bytes)} are left for the KV cache, and one sequence of {context:.0f} tokens takes "
        problem += _gib(deployment.cache_bytes(context))
    raise UsageError(
        f"{deployment.model.name} in {deployment.precision.name} with {deployment.layout} does not fit on "
        f"{deployment.cluster.machine.name}: {problem}. {_remedies(deployment, context, memory_share)}"
    )


def _remedies(deployment: Deployment, context: float, memory_share: float) -> str:
    """Changes after which it fits, as a sentence."""
    remedies = []
    layout = deployment.layout
    for tp in (2, 4, 8, 16, 32, 64):
        if tp <= layout.tp or (deployment.model.heads and deployment.model.heads % tp):
            continue
        wider = ServingLayout(tp=tp, pp=layout.pp, dp=layout.dp, ep=layout.ep)
        if _fits(replace(deployment, layout=wider), context, memory_share):
            needs = "" if wider.gpus <= deployment.cluster.gpus else f" (needs {wider.gpus} GPUs)"
            remedies.append(f"tp={tp}{needs}")
            break
    for name in ("fp8", "int8", "fp4", "int4"):
        narrower = serving_precision(name)
        if narrower.weight_bytes >= deployment.precision.weight_bytes:
            continue
        try:
            narrower = precision_on_machine(deployment.cluster.machine, deployment.model, narrower)
        except UsageError:
            continue
        if _fits(replace(deployment, precision=narrower), context, memory_share):
            remedies.append(f"precision={name!r}")
            break
    room = cache_room(deployment, memory_share=memory_share)
    if room.cache_bytes > 0 and room.tokens > 0:
        remedies.append(f"at most {room.tokens} tokens in one sequence")
    return (
        "What would fit: " + ", or ".join(remedies) + "." if remedies else "Nothing up to tp=64 and 4 bits would fit."
    )


def _fits(deployment: Deployment, context: float, memory_share: float) -> bool:
    return cache_room(deployment, memory_share=memory_share).cache_bytes >= deployment.cache_bytes(context)


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
