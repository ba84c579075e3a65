"""Peak memory of a training job, per rank of each pipeline stage, by part.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.training.job import Job, precision_named
>>> from nearpeak.plan.training.layout import Layout
>>> job = Job(model=model("llama-2-7b"), layout=Layout(gpus=1, global_batch=1, sharding="none"), sequence=512,
...           precision=precision_named("bf16"))
>>> found = memory(job)
>>> [round(value / 1e9, 1) for value in (found.parameters, found.gradients, found.optimizer, found.states)]
[13.5, 13.5, 53.9, 80.9]
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.plan.training.activations import EAGER_LOGITS, EAGER_RUNNING, LOGITS, layer_bytes
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.stages import Stage, stages
from nearpeak.plan.training.stages import stage as stage_of

CONTEXT = 0.6e9
"""CUDA context and libraries: outside of what torch allocates."""
COMMUNICATORS = 0.9e9
"""Buffers of NCCL's communicators, outside of torch too; on more than one GPU."""
WORKSPACE = 0.3e9
"""cuBLAS and attention workspaces, small tensors, alignment."""
SLACK = 0.05
"""What torch's allocator holds beyond what is allocated, of the activations and temporaries."""

MARGIN = 0.05
"""Share by which published peaks lay above the expected one at the most, but for 3 %: fragmentation, unequal ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes at the peak on each rank of one pipeline stage."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: dict[str, float]
    """By module, all microbatches in flight together."""
    logits: float
    communication: float
    """Gathered weights, buckets of gradients, gathered sequences and dispatched tokens."""
    recomputed: float
    """The largest piece that is computed again at once."""
    workspace: float
    context: float
    """Outside of torch: driver, libraries, communicators."""

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
        """What `torch.cuda.max_memory_allocated` would say."""
        return self.states + self.activation + self.logits + self.communication + self.recomputed + self.workspace

    @property
    def slack(self) -> float:
        """What the allocator holds beyond that."""
        return SLACK * (self.allocated - self.states)

    @property
    def reserved(self) -> float:
        """What `torch.cuda.max_memory_reserved` would say."""
        return self.allocated + self.slack

    @property
    def total(self) -> float:
        """What the GPU must have."""
        allocated = self.allocated
        return allocated + SLACK * (allocated - self.states) + self.context

    @property
    def safe(self) -> float:
        """With what fragmentation was seen to take: 39 published peaks lie below it, or above by less than 3 %."""
        return self.context + (1 + MARGIN) * self.reserved


def memory(job: Job) -> StageMemory:
    """The stage that needs the most."""
    return max(memory_by_stage(job), key=lambda stage: stage.total)


def memory_by_stage(job: Job) -> list[StageMemory]:
    """Every stage of the pipeline."""
    return [_stage(job, stage) for stage in stages(job.model, job.layout)]


def peak(job: Job) -> float:
    """`total` of the fuller one of the first stage, which holds the most microbatches, and the last; for a search."""
    layout = job.layout
    first = _total(job, stage_of(job.model, layout, 0))
    if layout.pp == 1:
        return first
    first = max(first, _total(job, stage_of(job.model, layout, layout.pp - 1)))
    if layout.pp > 2 and "D" in job.model.feeds and "E" in job.model.feeds:
        first = max(first, _total(job, stage_of(job.model, layout, 1)))  # where the first layers have no experts
    return first


def _total(job: Job, stage: Stage) -> float:
    states = sum(_states(job, stage))
    rest = stage.in_flight * job.microbatch_tokens * layer_bytes(job, stage.mixers, stage.feeds)[1]
    rest += _recomputed(job, stage) + _logits(job, stage) + _communication(job, stage) + _workspace(job, stage)
    return states + (1 + SLACK) * rest + _context(job)


def _stage(job: Job, stage: Stage) -> StageMemory:
    parameters, gradients, optimizer = _states(job, stage)
    held = stage.in_flight * job.microbatch_tokens
    return StageMemory(
        stage=stage.index,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations={name: held * value for name, value in layer_bytes(job, stage.mixers, stage.feeds)[0].items()},
        logits=_logits(job, stage),
        communication=_communication(job, stage),
        recomputed=_recomputed(job, stage),
        workspace=_workspace(job, stage),
        context=_context(job),
    )


def _states(job: Job, stage: Stage) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer on one rank."""
    layout, precision, sharding = job.layout, job.precision, job.layout.sharding
    dense, experts = stage.dense_weights, stage.expert_weights
    weights, ranks = dense + experts, layout.shard_ranks
    expert_ranks = 1 if sharding == "none" else max(1, min(layout.edp, ranks))
    mine = dense / ranks + experts / expert_ranks
    parameters = (mine if sharding in ("zero3", "hsdp") else weights) * precision.parameters
    gradients = (weights if sharding in ("none", "zero1") else mine) * precision.gradients * job.trainable
    optimizer = mine * precision.optimizer * job.trainable
    if layout.offload != "none":
        optimizer = 0.0
        gradients = gradients if layout.offload == "optimizer" else 0.0
        parameters = 0.0 if layout.offload == "all" else parameters
    return parameters, gradients, optimizer


def _recomputed(job: Job, stage: Stage) -> float:
    """The one layer that is computed again at a time."""
    if "layer" not in job.layout.recompute or not stage.layers:
        return 0.0
    return job.microbatch_tokens * layer_bytes(job, stage.mixers, stage.feeds, whole=True)[1] / stage.layers


def _workspace(job: Job, stage: Stage) -> float:
    """Workspaces, and gradients of weights before they are added to those of the step.

    Fused software adds them inside the product, and keeps an empty tensor of each shape of weight for autograd's sake.
    """
    if job.trainable < 0.5:
        return WORKSPACE
    weights = stage.output_weights if job.precision.gradients > 2 or job.software == "fused" else 0.0
    if job.software == "fused" and job.layout.sharding not in ("zero3", "hsdp"):
        weights += stage.shapes
    running = EAGER_RUNNING * job.microbatch_tokens * job.model.hidden if job.software == "eager" else 0.0
    return WORKSPACE + 2.0 * weights + running


def _logits(job: Job, stage: Stage) -> float:
    if not stage.has_output or job.model.image_tokens:
        return 0.0
    each = EAGER_LOGITS if job.software == "eager" else LOGITS
    return each * job.microbatch_tokens * job.model.vocabulary / job.layout.tp


def _context(job: Job) -> float:
    return CONTEXT + (COMMUNICATORS if job.layout.gpus > 1 else 0.0)


def _communication(job: Job, stage: Stage) -> float:
    """Buffers that stand while something is on its way."""
    layout, model = job.layout, job.model
    tokens, total = job.microbatch_tokens, 0.0
    if layout.tp > 1:
        total += 2.0 * tokens * model.hidden  # a sequence gathered for the product that runs
    if layout.ep > 1:
        spread = layout.tp if layout.sequence_parallel else 1
        total += 2.0 * tokens * model.active_experts * (model.latent or model.hidden) / spread
    if layout.sharding in ("zero3", "hsdp") and layout.shard_ranks > 1:
        total += 2 * 2.0 * stage.unsharded_layer  # the layer that runs, and the next one
        total += 2.0 * stage.unsharded_layer  # its gradients before they are scattered
    elif layout.sharding == "none" and job.software == "eager" and layout.state_ranks > 1:
        # torch's DistributedDataParallel keeps copies of all gradients in its buckets
        total += job.precision.parameters * (stage.dense_weights + stage.expert_weights) * job.trainable
    elif layout.state_ranks > 1:
        total += 0.2e9  # buckets
    return total
