"""Peak memory of a training job, per rank of each pipeline stage, by part.

Activations are counted by module: a tensor that a GEMM, a norm or attention needs again counts once. Fused kernels save
the inputs of GEMMs, queries, keys and values, the output of attention and the two halves of a gated feed; eager code
saves what stands between them too (`EAGER_BLOCK`, `EAGER_ACTIVATION`). Fused attention saves no scores.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.training.job import Job, precision_named
>>> from nearpeak.plan.training.layout import Layout
>>> job = Job(model=get_model("llama-2-7b"), layout=Layout(gpus=1, global_batch=1, sharding="none"),
...           sequence=512, precision=precision_named("bf16"))
>>> found = memory(job)
>>> [round(value / 1e9, 1) for value in (found.parameters, found.gradients, found.optimizer, found.states)]
[13.5, 13.5, 53.9, 80.9]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from nearpeak.plan.models.model import Model, attention_matrices
from nearpeak.plan.training.job import Job, Precision, Software
from nearpeak.plan.training.layout import (
    Stage,
    deferred,
    kinds_of_stages,
    output_layers,
    pipeline_stage,
    pipeline_stages,
    stage_groups,
)

CONTEXT = 0.6e9
"""CUDA context and libraries, outside of torch's allocator. Assumed."""
COMMUNICATORS = 0.9e9
"""Buffers of NCCL's communicators, outside of torch's allocator, on more than one GPU. Assumed."""
WORKSPACE = 0.3e9
"""cuBLAS and attention workspaces, small tensors, alignment. Assumed."""
SLACK = 0.05
"""Memory that torch's allocator reserves beyond what is allocated, as a share of activations and temporaries."""
MARGIN = 0.05
"""Margin of `safe`: published peaks exceed the expected one by at most this and 3 % (fragmentation, unequal ranks)."""
EAGER_BLOCK = 6.5
"""Bytes per hidden channel that eager code saves around a mixer or a feed beyond fused kernels: rotated queries and
keys, the float32 input of the norm. Fitted with the next three by `benchmarks.plan.fit_memory` on published peaks;
underestimates weigh four times as much as overestimates."""
EAGER_ACTIVATION = 2.0
"""Bytes per intermediate channel: the activated half of a gated feed."""
EAGER_RUNNING = 60.0
"""Bytes per token and hidden channel of temporaries of the running layer: gathered sequences, gradients."""
EAGER_LOGITS = 7.4
"""Bytes per logit in eager code."""
LOGITS = 6.5
"""Bytes per logit: 16-bit logits, the float32 copy for the loss, and a part of the gradient."""
UNFUSED_LOGITS = 12.0
"""Bytes per logit of a loss of single operators: 16-bit logits and gradient, the float32 copy, the softmax."""
BUCKETS = 0.2e9
"""Bytes of buckets in which gradients are reduced, where there are so many. Assumed."""
SCAN_CHUNK = 128
"""Tokens between two saved states of a state-space scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak bytes on each rank of one pipeline stage."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: dict[str, float]
    """By module, of all microbatches in flight."""
    logits: float
    communication: float
    """Gathered weights, buckets of gradients, gathered sequences and dispatched tokens."""
    recomputed: float
    """The largest part that is recomputed at once."""
    workspace: float
    context: float
    """Outside of torch's allocator: driver, libraries, communicators."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def activation(self) -> float:
        """All activations."""
        return sum(self.activations.values())

    @property
    def allocated(self) -> float:
        """Prediction of `torch.cuda.max_memory_allocated`."""
        return self.states + self.activation + self.logits + self.communication + self.recomputed + self.workspace

    @property
    def slack(self) -> float:
        """Memory that the allocator reserves beyond `allocated`."""
        return SLACK * (self.allocated - self.states)

    @property
    def reserved(self) -> float:
        """Prediction of `torch.cuda.max_memory_reserved`."""
        return self.allocated + self.slack

    @property
    def total(self) -> float:
        """Memory that the GPU must have."""
        allocated = self.allocated
        return allocated + SLACK * (allocated - self.states) + self.context

    @property
    def safe(self) -> float:
        """`total` with a margin for fragmentation: 38 of 39 published peaks lie below it, or above by less than 3 %."""
        return self.context + (1 + MARGIN) * self.reserved


def memory(job: Job) -> StageMemory:
    """The stage that needs the most memory."""
    return max(memory_by_stage(job), key=lambda stage: stage.total)


def memory_by_stage(job: Job) -> list[StageMemory]:
    """Every stage of the pipeline."""
    stages = [_stage_memory(job, stage) for stage in pipeline_stages(job.model, job.layout)]
    if job.layout.schedule != "dualpipe":
        return stages
    return [_both_directions(stage, other) for stage, other in zip(stages, reversed(stages), strict=True)]


def _both_directions(stage: StageMemory, other: StageMemory) -> StageMemory:
    """A rank that has `stage` of one direction of DualPipe and `other` of the other one.

    Optimizer states of both are shared with the rank that has them the other way round.
    """
    names = dict.fromkeys((*stage.activations, *other.activations))
    return replace(
        stage,
        parameters=stage.parameters + other.parameters,
        gradients=stage.gradients + other.gradients,
        optimizer=(stage.optimizer + other.optimizer) / 2,
        activations={name: stage.activations.get(name, 0.0) + other.activations.get(name, 0.0) for name in names},
        logits=stage.logits + other.logits,
        communication=max(stage.communication, other.communication),
        recomputed=max(stage.recomputed, other.recomputed),
        workspace=max(stage.workspace, other.workspace),
    )


def peak(job: Job) -> float:
    """`total` of the fullest stage, without the breakdown: fast, for a search.

    Of stages that are alike, the first has the most microbatches in flight.
    """
    layout = job.layout
    if layout.schedule not in ("zero-bubble", "dualpipe"):
        groups = stage_groups(job.model, layout)
        return max(_stage_total(job, pipeline_stage(job.model, layout, index)) for _, index, _ in groups)
    kinds = kinds_of_stages(
        job.model.mixers, job.model.feeds, layout.pp, layout.virtual, layout.split, output_layers(job.model)
    )
    if layout.schedule == "zero-bubble":  # the last of a kind has as many microbatches, and more of them recomputed
        last = {kind: index for index, kind in enumerate(kinds)}
        return max(_stage_total(job, pipeline_stage(job.model, layout, index)) for index in last.values())
    # two stages of a rank have pp + 1 microbatches in flight together, wherever they are: kinds of pairs are enough
    pairs = {pair: index for index, pair in enumerate(zip(kinds, reversed(kinds), strict=True))}
    return max(_pair(job, index).total for index in pairs.values())


def _pair(job: Job, index: int) -> StageMemory:
    """A rank of DualPipe that has the stage `index` of one direction."""
    pair = (_stage_memory(job, pipeline_stage(job.model, job.layout, at)) for at in (index, job.layout.pp - 1 - index))
    return _both_directions(*pair)


def pair_bytes(job: Job, index: int) -> float:
    """`total` of a rank of DualPipe without activations."""
    pair = _pair(job, index)
    return pair.total - (1 + SLACK) * pair.activation


def _stage_memory(job: Job, stage: Stage) -> StageMemory:
    parameters, gradients, optimizer = _states(job, stage)
    tokens = stage.in_flight * job.microbatch_tokens
    activations = {name: tokens * value for name, value in layer_bytes(job, stage.mixers, stage.feeds)[0].items()}
    if waiting := _deferred_bytes(job, stage):
        activations["deferred weight gradients"] = waiting
    return StageMemory(
        stage=stage.index,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=_logits(job, stage),
        communication=_communication(job, stage),
        recomputed=_recomputed(job, stage),
        workspace=_workspace(job, stage),
        context=_context(job),
    )


def _deferred_bytes(job: Job, stage: Stage) -> float:
    """Bytes of microbatches whose gradients of weights come later: inputs of all GEMMs, recomputed ones too."""
    layout = job.layout
    if layout.schedule != "zero-bubble" or not job.trains_weights:
        return 0.0
    tokens = deferred(layout.pp, layout.microbatches, stage.index) * job.microbatch_tokens
    return tokens and tokens * layer_bytes(job, stage.mixers, stage.feeds, whole=True)[1]


def _stage_total(job: Job, stage: Stage) -> float:
    fixed, each = stage_bytes(job, stage)
    return fixed + stage.in_flight * each + (1 + SLACK) * _deferred_bytes(job, stage)


def stage_bytes(job: Job, stage: Stage) -> tuple[float, float]:
    """`total` of a stage: what does not depend on the microbatches in flight, and what each of them adds."""
    rest = _recomputed(job, stage) + _logits(job, stage) + _communication(job, stage) + _workspace(job, stage)
    each = job.microbatch_tokens * layer_bytes(job, stage.mixers, stage.feeds)[1]
    return sum(_states(job, stage)) + (1 + SLACK) * rest + _context(job), (1 + SLACK) * each


def _states(job: Job, stage: Stage) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states in the memory of one GPU."""
    parameters, gradients, optimizer = states_of_rank(job, stage)
    offload = job.layout.offload
    if offload != "none":
        optimizer = 0.0
        gradients = gradients if offload == "optimizer" else 0.0
        parameters = 0.0 if offload == "all" else parameters
    return parameters, gradients, optimizer


def states_of_rank(job: Job, stage: Stage) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states of one rank, wherever they are."""
    layout, precision, sharding = job.layout, job.precision, job.layout.sharding
    dense, experts = stage.dense_weights, stage.expert_weights
    weights, ranks = dense + experts, layout.shard_ranks
    expert_ranks = 1 if sharding == "none" else max(1, min(layout.edp, ranks))
    shard = dense / ranks + experts / expert_ranks
    parameters = (shard if sharding in ("zero3", "hsdp") else weights) * precision.parameters
    if sharding == "shard_grad_op":  # the shards in full precision, and all weights as they were gathered
        parameters = shard * precision.parameters + weights * precision.wire
    gradients = (weights if sharding in ("none", "zero1") else shard) * precision.gradients * job.trainable
    if sharding == "zero2" and layout.virtual > 1:  # the piece that is running has its gradients whole
        gradients += (weights - shard) / layout.virtual * precision.gradients * job.trainable
    return parameters, gradients, shard * precision.optimizer * job.trainable


def _recomputed(job: Job, stage: Stage) -> float:
    """Activations of the one layer that is recomputed at a time."""
    if "layer" not in job.layout.recompute or not stage.layers:
        return 0.0
    return job.microbatch_tokens * layer_bytes(job, stage.mixers, stage.feeds, whole=True)[1] / stage.layers


def _workspace(job: Job, stage: Stage) -> float:
    """Workspaces, and gradients of weights before they are added to those of the step.

    Fused software adds them inside the GEMM, and has an empty tensor of each shape of weight for autograd.
    """
    if job.trainable < 0.5:
        return WORKSPACE
    weights = stage.output_weights if job.precision.gradients > 2 or job.software == "fused" else 0.0
    if job.software == "fused" and not job.layout.gathers_weights:
        weights += stage.shapes
    running = EAGER_RUNNING * job.microbatch_tokens * job.model.hidden if job.software == "eager" else 0.0
    return WORKSPACE + 2.0 * weights + running


def _logits(job: Job, stage: Stage) -> float:
    if not stage.has_output or job.model.image_tokens:
        return 0.0
    each = {"eager": EAGER_LOGITS, "unfused": UNFUSED_LOGITS}.get(job.software, LOGITS)
    return each * job.microbatch_tokens * job.model.vocabulary / job.layout.tp


def _context(job: Job) -> float:
    return CONTEXT + (COMMUNICATORS if job.layout.gpus > 1 else 0.0)


def _communication(job: Job, stage: Stage) -> float:
    """Buffers of communication."""
    layout, model = job.layout, job.model
    tokens, total = job.microbatch_tokens, 0.0
    if layout.tp > 1:
        total += 2.0 * tokens * model.hidden  # a sequence gathered for the running GEMM
    if layout.ep > 1:
        spread = layout.tp if layout.sequence_parallel else 1
        total += 2.0 * tokens * model.active_experts * (model.latent or model.hidden) / spread
    if layout.gathers_weights or layout.offload == "all":
        total += min(2, max(1, stage.layers)) * 2.0 * stage.unsharded_layer  # the running layer, and the next one
        total += 2.0 * stage.unsharded_layer  # its gradients before they are scattered
    elif layout.sharding == "none" and job.software == "eager" and layout.state_ranks > 1:
        # torch's DistributedDataParallel keeps copies of all gradients in its buckets
        total += job.precision.parameters * (stage.dense_weights + stage.expert_weights) * job.trainable
    elif layout.state_ranks > 1:
        # buckets of gradients; those of a kept layer are whole before they are scattered
        gradients = job.precision.gradients * (stage.dense_weights + stage.expert_weights) * job.trainable
        whole = 2.0 * stage.unsharded_layer if layout.sharding == "shard_grad_op" else 0.0
        total += max(whole, min(BUCKETS, gradients))
    return total


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """All that the activations of a token in a layer depend on."""

    model: Model
    precision: Precision
    software: Software
    sequence: int
    """Tokens of a sequence where attention saves its scores; else 0."""
    tp: int
    spread: int
    """Ranks that share the tensors between blocks: `tp` with sequence parallelism, else 1."""
    etp: int
    overlap_experts: bool
    recompute: tuple[str, ...]
    recompute_share: float

    @property
    def eager(self) -> bool:
        """Whether each operator is a kernel of its own."""
        return self.software == "eager"


def layer_bytes(job: Job, mixers: str, feeds: str, *, whole: bool = False) -> tuple[Mapping[str, float], float]:
    """Bytes per token of some layers, by module and in all; a recomputed layer saves its input alone.

    `whole`: as if nothing were recomputed, which is what a layer takes while it is recomputed.
    """
    layout = job.layout
    settings = ActivationSettings(
        job.model,
        job.precision,
        job.software,
        job.sequence if job.software == "unfused" else 0,
        layout.tp,
        layout.tp if layout.sequence_parallel else 1,
        layout.etp,
        layout.overlap_experts,
        () if whole else layout.recompute,
        1.0 if whole else layout.recompute_share,
    )
    return _layer_bytes(settings, mixers, feeds)


@lru_cache(maxsize=4096)
def _layer_bytes(settings: ActivationSettings, mixers: str, feeds: str) -> tuple[Mapping[str, float], float]:
    share = settings.recompute_share
    if share == 1 or not settings.recompute:
        return _bytes_where_recomputed(settings, mixers, feeds)
    kept, _ = _bytes_where_recomputed(replace(settings, recompute=()), mixers, feeds)
    recomputed, _ = _bytes_where_recomputed(settings, mixers, feeds)
    names = dict.fromkeys((*kept, *recomputed))
    mean = {name: (1 - share) * kept.get(name, 0.0) + share * recomputed.get(name, 0.0) for name in names}
    return mean, sum(mean.values())


def _bytes_where_recomputed(settings: ActivationSettings, mixers: str, feeds: str) -> tuple[Mapping[str, float], float]:
    """Bytes per token of layers that all recompute what `settings` says."""
    total: dict[str, float] = {}
    if "layer" in settings.recompute:
        total["inputs of layers"] = len(mixers) * 2.0 * settings.model.hidden / settings.spread
        return total, sum(total.values())
    for module_bytes, letters in ((mixer_bytes, mixers), (feed_bytes, feeds)):
        for kind in sorted(set(letters) - {"-"}):
            for name, value in module_bytes(settings, kind).items():
                total[name] = total.get(name, 0.0) + letters.count(kind) * value
    return total, sum(total.values())


def mixer_bytes(settings: ActivationSettings, kind: str) -> Mapping[str, float]:
    """Bytes per token of one mixer on one rank, by module."""
    model, tp, saved = settings.model, settings.tp, settings.precision.saved
    parts = _residual_and_norm(settings)
    if kind == "M":
        inner, states = model.ssm_heads * model.ssm_head_dim, 2 * model.ssm_groups * model.ssm_state
        scan = 4.0 * inner * model.ssm_state / SCAN_CHUNK
        parts["state space"] = (2.0 * (2 * inner + states + model.ssm_heads) + 2.0 * (inner + states) + scan) / tp
        parts["output"] = (2.0 + saved) * inner / tp
        return parts
    values, heads = model.heads * model.value_dim, model.heads * model.head_dim
    if "ops" in settings.recompute:
        outputs = sum(outputs for _, _, outputs in attention_matrices(model))
        saved_gemms = (outputs - model.hidden) / tp / 2 + model.hidden / settings.spread / 2
        return {
            "inputs of layers": 2.0 * model.hidden / settings.spread,
            "GEMMs": 2.0 * saved_gemms,
            "attention": (2.0 * values + 4.0 * model.heads) / tp,
        }
    if model.kv_rank:
        parts["latents"] = (2.0 + saved) * (model.q_rank + model.kv_rank) + 2.0 * model.rope_dim
        parts["queries, keys, values"] = 0.0 if "mla_up" in settings.recompute else 2.0 * (2 * heads + values) / tp
    else:
        parts["queries, keys, values"] = 2.0 * (heads + model.kv_heads * (model.head_dim + model.value_dim)) / tp
    parts["attention"] = (2.0 * values + 4.0 * model.heads) / tp
    if settings.software == "unfused" and "attention" not in settings.recompute:
        parts["scores"] = 5.0 * model.heads * settings.sequence / tp  # after the softmax, after dropout, and its mask
    if saved < 2:
        parts["output"] = saved * values / tp  # a copy in the format of the product
    return parts


def feed_bytes(settings: ActivationSettings, kind: str) -> Mapping[str, float]:
    """Bytes per token of one feed on one rank, by module."""
    model, saved = settings.model, settings.precision.saved
    parts = _residual_and_norm(settings)
    inner = settings.precision.activation * (2 if model.gated else 1) + (EAGER_ACTIVATION if settings.eager else 0.0)
    inner += 0.0 if "feed_activation" in settings.recompute else saved
    if "ops" in settings.recompute:
        inner, parts = 1.0 * (2 if model.gated else 1), {"GEMMs": model.hidden / settings.spread}
    if kind == "D":
        if "feed" not in settings.recompute:
            parts["feed"] = model.intermediate * inner / settings.tp
        return parts
    width, routed = model.latent or model.hidden, model.active_experts / settings.spread
    parts["router"] = 8.0 * model.experts / settings.spread
    if "experts" not in settings.recompute:
        # the router's weights are applied with the activation, so that no output of an expert is needed again
        parts["dispatched"] = routed * saved * width
        parts["experts"] = routed * model.expert_intermediate * inner / settings.etp
    parts["shared experts"] = model.shared_intermediate * inner / settings.tp
    if settings.overlap_experts:  # attention, dispatch, experts and combine run separately and save their outputs
        parts["schedule"] = 4 * 2.0 * model.hidden / settings.spread
    if model.latent:
        parts["latents"] = 2.0 * (saved + 2.0) * model.latent / settings.spread
    return parts


def _residual_and_norm(settings: ActivationSettings) -> dict[str, float]:
    """The residual and the norm before a block."""
    hidden = settings.model.hidden / settings.spread
    parts = {
        "residual": 2.0 * hidden,
        "norm": 0.0 if "norm" in settings.recompute else settings.precision.saved * hidden,
    }
    if settings.eager:
        parts["eager"] = EAGER_BLOCK * hidden
    return parts
