"""Seconds of one training step, as parts that sum to it, and the communication that hides behind them.

`Planner.time` adds up one step. Every kind of pipeline stage is computed in full, with its layers, recomputation,
communication, launches and optimizer (`StageSeconds`); the slowest sets the pace, and the others are its bubble.
Computation: a GEMM takes its FLOPs at the rate that large GEMMs reach, and its traffic at the memory's. The sum of the
two is near the first for large matrices and near the second for thin ones, which is how utilization falls with size.
Communication: collectives over the ranks of each kind of parallelism.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline. The experts' mesh has its own
order over the same GPUs: tensor inside an expert, experts, data, pipeline. Neighbors in a group lie as far apart as the
product of the inner degrees, which decides what stays inside a node or a rack.

Fitted constants are in `efficiency.py`; the constants here have their source beside them.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> from nearpeak.plan.training.job import Job, precision_named
>>> from nearpeak.plan.training.layout import Layout
>>> layout = Layout(gpus=64, tp=4, pp=4, virtual=5, global_batch=128, overlap_tensor=True)
>>> job = Job(model=get_model("llama-3-70b"), layout=layout, sequence=8192,
...           precision=precision_named("bf16-master"))
>>> step = training_time(job, Cluster.of("h100-sxm x 64"))
>>> abs(sum(step.parts.values()) - step.seconds) < 1e-9 * step.seconds
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nearpeak.errors import UsageError
from nearpeak.machines.machine import Machine
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import CollectiveTimes
from nearpeak.plan.models.model import (
    BACKWARD_ATTENTION,
    Model,
    attention_matrices,
    forward_flops,
    scan_flops,
    score_flops,
    state_space_matrices,
)
from nearpeak.plan.training.efficiency import (
    GRAPHED_EXPERTS_YEAR,
    Efficiency,
    attention_rate,
    gemm_rate,
    load_efficiency,
)
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout, Stage, pipeline_stage, stage_groups
from nearpeak.plan.training.memory import states_of_rank

PARTS = (
    "GEMMs", "attention", "memory-bound", "casts", "recompute", "launches", "tensor", "context", "experts", "pipeline",
    "bubble", "data", "optimizer", "step", "stragglers",
)  # fmt: skip
"""Names of the parts of a step, in the order in which they are shown."""
RECOMPUTED_TENSOR, RECOMPUTED_CONTEXT, RECOMPUTED_EXPERTS = 1 / 2, 1 / 3, 1 / 2
"""Communication that full recomputation adds: the forward pass has half of it, and a third of the ring's."""
EXCHANGE_MULTIPROCESSORS = 20 / 132
"""Share of a GPU's multiprocessors that an overlapped exchange of experts occupies: DeepSeek-V3's kernels on an H800
(arXiv:2412.19437, section 3.2.2)."""
OFFLOAD_SHARE = 0.8
"""Share of the PCIe bandwidth at which offloaded states move. Assumed."""
LAUNCH_SHARPNESS = 1.5
"""Power of the p-norm that joins device and host time: kernels and launches overlap, but not in full. Of 1.2, 1.5, 2
and 4 the one with the least error on published runs with experts."""
HIDING_SHARPNESS = 3.0
"""Power of the p-norm that limits how much communication computation hides where both are as long. Assumed."""
SCAN_SHARE = 0.5
"""Rate of a state-space scan against fused attention. Assumed."""
SCORE_SHARE = 0.6
"""Rate of the batched GEMMs of unfused attention against large GEMMs. Assumed."""
UNFUSED_ACTIVATION = 5.0
"""Traffic of an activation that is written as single operators, against that of one kernel. Assumed."""
BUCKET, BUCKET_PER_RANK = 40e6, 1e6
"""Weights whose gradients are reduced at once: Megatron's smallest bucket, and its share of each data-parallel rank
(NVIDIA/Megatron-LM, distributed_data_parallel.py)."""
DEDUPLICATED_YEAR = 2025.6
"""Since when a token is sent once to a node, and once to a rank (DeepEP, HybridEP in Megatron)."""
FETCH_SECONDS, FETCH_SECONDS_PER_RANK = 3e-3, 5e-6
"""Seconds beyond the collective, and for each rank, that ZeRO-3 of 2021 took to fetch or reduce one matrix: hooks in
Python, no prefetching, and a separate tensor for the piece of every rank. Assumed; later software gathers a layer at
once."""
MATRICES_PER_LAYER = 7
"""Matrices of one layer: as many collectives, where software has no buckets."""

# bytes per value of memory-bound passes over 16-bit tensors
BLOCK_FORWARD, BLOCK_BACKWARD = 8.0, 12.0
"""Residual and norm around a block: each read and written once forward; gradients and inputs backward, six passes."""
ROTARY_BYTES = 4.0
"""Rotation of a query or key: read and written, in each direction."""
SCAN_FORWARD, SCAN_TOTAL = 16.0, 48.0
"""Convolution and scan of a state-space layer, before the fitted factor `Efficiency.state_space`."""
LOGITS_FORWARD, LOGITS_BACKWARD = 10.0, 6.0
"""Logits: read, copied to float32, read for the maximum and the sum; gradients computed in place."""
EXPERT_BIAS_FORWARD, EXPERT_BIAS_BACKWARD = 6.0, 10.0
"""A gated activation, forward and backward, for `UNFUSED_ACTIVATION`."""
ACTIVATION_BYTES = 6.0
"""A gated activation that is computed again: two halves read, one written."""
SCORE_PASSES_FORWARD, SCORE_PASSES = 5, 11
"""Passes over the scores of unfused attention, forward and in all: scores, mask and softmax, dropout; six backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """One step: its parts sum to `seconds`; `hidden` is communication that overlaps with them."""

    seconds: float
    parts: dict[str, float]
    """Seconds by name, those of `PARTS`."""
    hidden: dict[str, float]
    slowest_stage: int
    """The first of the pipeline stages that set the pace."""
    tokens: int
    gpus: int
    model_flops: float
    """FLOPs of the step on all GPUs: three times the forward pass, less the gradients of weights that are frozen (twice
    for GEMMs beside adapters); causal attention counts what its mask leaves."""
    hardware_flops: float
    """`model_flops` and recomputation."""
    peak: float
    """FLOP/s of one GPU in the precision of the GEMMs, from the datasheet."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, against the peak in the precision of the GEMMs; causal attention counts half."""
        return self.model_flops / (self.seconds * self.gpus * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputation counts."""
        return self.hardware_flops / (self.seconds * self.gpus * self.peak)


def training_time(job: Job, cluster: Cluster, efficiency: Efficiency | None = None) -> TrainingTime:
    """One step of `job` on `cluster`."""
    return Planner(cluster, efficiency).time(job)


Kinds = list[tuple[float, float, int, float]]


class Planner:
    """Training times on one cluster. Memoizes what layouts have in common, so that a search is fast."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency | None = None, times: CollectiveTimes | None = None):
        self.cluster = cluster
        self.efficiency = efficiency or load_efficiency().values
        self.collectives = TrainingCollectives(times or CollectiveTimes(cluster), self.efficiency)
        self._layers: dict[object, LayerSeconds] = {}
        self._rates: dict[object, TrainingRates] = {}
        self._flops: dict[object, tuple[float, float]] = {}

    def seconds(self, job: Job) -> float:
        """Seconds of one step of `job`."""
        layout = job.layout
        stages = self.stages(job)
        pipeline = stages[0][0].pipeline_exposed
        kinds = [
            (stage.microbatch - pipeline, stage.data_once + stage.optimizer, count, stage.filled)
            for stage, count in stages
        ]
        return self.step_seconds(job.layout, kinds, pipeline, layout.virtual)

    def step_seconds(self, layout: Layout, kinds: Kinds, pipeline: float, virtual: int) -> float:
        """Seconds of a step of `layout` with stages of these `kinds`, each cut into `virtual` pieces.

        A kind is the seconds of a microbatch without `pipeline`, its sends; the seconds once per step; how many stages
        are of this kind; and `StageSeconds.filled`.
        """
        microbatches, share = layout.microbatches, waiting_share(layout)
        slowest = own = total = 0.0
        for each, once, count, filled in kinds:
            each += pipeline
            waiting = max(0.0, share * each - filled)
            total += count * waiting
            if microbatches * each + once > slowest:
                slowest, own = microbatches * each + once, waiting
        return (slowest + (total - own) / virtual + self.efficiency.step) * (1 + self.straggle(layout))

    def time(self, job: Job) -> TrainingTime:
        """One step of `job`."""
        stages, layout = self.stages(job), job.layout
        slowest = max((stage for stage, _ in stages), key=lambda stage: stage.step(layout.microbatches))
        share = waiting_share(layout)
        bubble = sum(count * stage.waiting(share) for stage, count in stages) - slowest.waiting(share)
        bubble /= layout.virtual
        parts, hidden = self._parts(job, slowest, bubble)
        model_flops, recomputed_flops = self._token_flops(job)
        theoretical = self.cluster.machine.theoretical
        assert theoretical is not None
        return TrainingTime(
            seconds=sum(parts.values()),
            parts=parts,
            hidden=hidden,
            slowest_stage=slowest.index,
            tokens=job.tokens,
            gpus=job.layout.gpus,
            model_flops=model_flops * job.tokens,
            hardware_flops=(model_flops + recomputed_flops) * job.tokens,
            peak=theoretical.peak(job.precision.gemm_dtype),
        )

    def pipeline_exposed(self, job: Job) -> float:
        """Exposed seconds of the sends of one microbatch through the pieces of a stage."""
        exposed = self.efficiency.pipeline_exposed if job.layout.overlap_pipeline else 1.0
        return exposed * pipeline_seconds(job, self.collectives)

    def _parts(self, job: Job, stage: StageSeconds, bubble: float) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the parts of a step whose slowest stage is `stage`, and of communication hidden behind them."""
        microbatches, compute = job.layout.microbatches, stage.compute
        parts = {
            "GEMMs": microbatches * compute.gemm,
            "attention": microbatches * compute.attention,
            "memory-bound": microbatches * compute.memory,
            "casts": microbatches * compute.casts,
            "recompute": microbatches * stage.recompute,
            "launches": microbatches * stage.launches,
            "tensor": microbatches * stage.tensor_exposed,
            "context": microbatches * stage.context_exposed,
            "experts": microbatches * stage.experts_exposed,
            "pipeline": microbatches * stage.pipeline_exposed,
            "bubble": bubble,
            "data": stage.data_once + microbatches * stage.data_each,
            "optimizer": stage.optimizer,
            "step": self.efficiency.step,
        }
        parts["stragglers"] = sum(parts.values()) * self.straggle(job.layout)
        hidden = {
            "tensor": microbatches * (stage.tensor - stage.tensor_exposed),
            "context": microbatches * (stage.context - stage.context_exposed),
            "experts": microbatches * (stage.experts - stage.experts_exposed),
            "pipeline": microbatches * (stage.pipeline - stage.pipeline_exposed),
            "data": stage.data_hidden,
        }
        return parts, hidden

    def straggle(self, layout: Layout) -> float:
        """Relative growth of a step by its slowest GPU."""
        return self.efficiency.straggle * math.log2(max(1.0, layout.gpus / self.cluster.gpus_per_node))

    def stages(self, job: Job) -> list[tuple[StageSeconds, int]]:
        """The kinds of pipeline stages of `job`, each with how many there are."""
        layout = job.layout
        if layout.gpus > self.cluster.gpus:
            raise UsageError(
                f"gpus={layout.gpus} is more than the cluster's {self.cluster.gpus}. Nearest: gpus={self.cluster.gpus}."
            )
        return [
            (self.stage(job, pipeline_stage(job.model, layout, index)), count)
            for _, index, count in stage_groups(job.model, layout)
        ]

    def stage(self, job: Job, stage: Stage) -> StageSeconds:
        """One pipeline stage, with everything that it does for a microbatch and for a step."""
        layout, pipeline = job.layout, pipeline_seconds(job, self.collectives)
        busy = self.busy(job, stage.mixers, stage.feeds, stage.has_output)
        launches = self.launches(job, busy.seconds, stage.layers, stage.feeds.count("E"))
        data, data_each, data_hidden = self._data_parallel(job, stage, busy.seconds + launches, busy.compute.forward)
        return StageSeconds(
            index=stage.index,
            compute=busy.compute,
            recompute=busy.recompute,
            launches=launches,
            tensor=busy.tensor,
            tensor_exposed=busy.tensor_exposed,
            context=busy.context,
            context_exposed=busy.context_exposed,
            experts=busy.experts,
            experts_exposed=busy.experts_exposed,
            pipeline=pipeline,
            pipeline_exposed=self.pipeline_exposed(job),
            data_each=data_each,
            data_once=data,
            data_hidden=data_hidden,
            optimizer=self.optimizer_seconds(job, stage),
            filled=0.0 if layout.pp == 1 else filled_seconds(layout, busy.forward, busy.weights),
        )

    def launches(self, job: Job, busy: float, layers: int, expert_layers: int) -> float:
        """Seconds beyond `busy` in which the device waits for the host.

        The host launches the kernels of some layers and learns where tokens went.
        """
        constants, model = self.efficiency, job.model
        launch = constants.launch_eager if job.software == "eager" else constants.launch_fused
        host = layers * launch
        if expert_layers:
            waiting = constants.expert_sync + constants.expert_each * model.experts / job.layout.ep
            static = not job.dropless or job.year >= GRAPHED_EXPERTS_YEAR
            waiting *= constants.expert_graph if static else 1.0
            host += (1 + model.predictions / model.layers) * expert_layers * waiting
        return _joined(busy, host) - busy

    def busy(self, job: Job, mixers: str, feeds: str, has_output: bool) -> BusySeconds:
        """Computation and exposed communication of some layers for one microbatch, without waiting for the host.

        No stages into which these layers are cut take less together.
        """
        model, layout, constants = job.model, job.layout, self.efficiency
        layers = self._layer_seconds(job)
        # modules that predict further tokens are spread like layers
        extra = 1 + model.predictions / model.layers
        compute, fed = ComputeSeconds(), ComputeSeconds()
        for kind, seconds in layers.mixers.items():
            compute.add(seconds, extra * mixers.count(kind))
        mixed = replace(compute)
        for kind, seconds in layers.feeds.items():
            fed.add(seconds, extra * feeds.count(kind))
        compute.add(fed, 1)
        layer_forward = compute.forward
        if has_output:
            compute.add(layers.output, 1 + model.predictions)
        blocks = len(mixers) + len(feeds) - mixers.count("-") - feeds.count("-")
        if not model.shared_intermediate:
            blocks -= feeds.count("E")
        attention_layers = sum(mixers.count(kind) for kind in "AWC")
        share = layout.recompute_share
        again = share if layout.recomputes("layer") else 0.0
        recompute = share * self._recompute_seconds(job, layers, mixers, feeds, mixed, layer_forward)
        tensor = extra * blocks * layers.tensor * (1 + again * RECOMPUTED_TENSOR)
        context = extra * attention_layers * layers.context * (1 + again * RECOMPUTED_CONTEXT)
        experts_again = share if layout.recomputes("experts") else 0.0
        experts = extra * feeds.count("E") * layers.experts * (1 + experts_again * RECOMPUTED_EXPERTS)
        experts_exposed = experts
        if layout.overlap_experts and layout.microbatches > 1:
            experts_exposed *= constants.expert_exposed
        if layout.schedule == "dualpipe":
            # the exchange takes multiprocessors from the computation that it hides behind
            hidden = hidden_behind(experts, compute.total + recompute)
            experts_exposed = experts - hidden + hidden * EXCHANGE_MULTIPROCESSORS
        return BusySeconds(
            compute=compute,
            recompute=recompute,
            tensor=tensor,
            tensor_exposed=tensor * (constants.tensor_exposed if layout.overlap_tensor else 1.0),
            context=context,
            context_exposed=context * constants.context_exposed,
            experts=experts,
            experts_exposed=experts_exposed,
            trains_weights=job.trains_weights,
        )

    def compute_seconds(self, job: Job) -> tuple[float, float]:
        """Computation of one microbatch on one GPU: of all layers with what they recompute, and of the output layer."""
        stage = self.stage(job, pipeline_stage(job.model, job.layout, 0))
        output = self._layer_seconds(job).output.total * (1 + job.model.predictions)
        return stage.compute.total + stage.recompute - output, output

    def _layer_seconds(self, job: Job) -> LayerSeconds:
        """One mixer and one feed of each kind, the output layer, and their communication, for one microbatch."""
        layout, model = job.layout, job.model
        key = (
            model, job.sequence, job.precision.name, job.software, job.year, job.trainable, layout.tp,
            layout.sequence_parallel, layout.cp, layout.microbatch, layout.ep, layout.etp, layout.routed_nodes,
            _accumulates(job),
        )  # fmt: skip
        if key not in self._layers:
            rates, collectives = self._rates_for(job), self.collectives
            layer, output = self.efficiency.layer_scale, self.efficiency.output_scale
            kinds = {letters: sorted(set(letters) - {"-"}) for letters in (model.mixers, model.feeds)}
            self._layers[key] = LayerSeconds(
                mixers={kind: mixer_seconds(job, kind, rates).scaled(layer) for kind in kinds[model.mixers]},
                feeds={kind: feed_seconds(job, kind, rates).scaled(layer) for kind in kinds[model.feeds]},
                output=output_seconds(job, rates).scaled(output),
                mla_up=layer * _mla_up_seconds(job, rates),
                tensor=tensor_seconds(job, collectives),
                context=context_seconds(job, collectives),
                experts=expert_seconds(job, collectives),
            )
        return self._layers[key]

    def _rates_for(self, job: Job) -> TrainingRates:
        key = (job.precision.name, job.software, job.year, job.trainable, _accumulates(job))
        if key not in self._rates:
            self._rates[key] = TrainingRates(self.cluster.machine, job, self.efficiency)
        return self._rates[key]

    def _token_flops(self, job: Job) -> tuple[float, float]:
        """Model FLOPs of a token, and recomputed ones."""
        layout = job.layout
        key = (job.model, job.sequence, layout.recompute, layout.recompute_share, job.trains_weights)
        if key not in self._flops:
            flops = forward_flops(job.model, job.sequence)
            training = flops.training - (0.0 if job.trains_weights else flops.gemm)
            recomputed = layout.recompute_share * recomputed_flops(job.model, job.sequence, layout.recompute)
            self._flops[key] = (training, recomputed)
        return self._flops[key]

    def _recompute_seconds(
        self, job: Job, layers: LayerSeconds, mixers: str, feeds: str, mixed: ComputeSeconds, forward: float
    ) -> float:
        """Seconds of one microbatch in which all these layers run forward passes again; `mixed`: their mixers."""
        layout, model = job.layout, job.model
        if not layout.recompute:
            return 0.0
        if layout.recomputes("layer"):
            return forward
        rates = self._rates_for(job)
        passes = job.microbatch_tokens / layout.tp * rates.traffic / rates.bandwidth  # seconds of a byte per token
        dense, experts = feeds.count("D"), feeds.count("E")
        seconds = 0.0
        for module in layout.recompute:
            if module == "attention":
                seconds += mixed.attention / (1 + BACKWARD_ATTENTION)
            elif module == "ops":
                seconds += forward - mixed.attention / (1 + BACKWARD_ATTENTION)
                # every second GEMM is saved
                gemms = mixed.gemm_forward + sum(
                    feeds.count(kind) * feed.gemm_forward for kind, feed in layers.feeds.items()
                )
                seconds -= gemms / 2
            elif module == "feed" and dense:
                seconds += dense * layers.feeds["D"].forward
            elif module == "experts" and experts:
                seconds += experts * layers.feeds["E"].forward
            elif module == "mla_up" and model.kv_rank:
                seconds += sum(mixers.count(kind) for kind in "AWC") * layers.mla_up
            elif module == "feed_activation":
                width = dense * model.intermediate
                width += experts * (model.active_experts * model.expert_intermediate + model.shared_intermediate)
                seconds += ACTIVATION_BYTES * width * passes
            elif module == "norm":
                blocks = sum(letter != "-" for letter in mixers + feeds)
                seconds += blocks * BLOCK_FORWARD / 2 * model.hidden * passes
        return seconds

    def _data_parallel(self, job: Job, stage: Stage, microbatch: float, forward: float) -> tuple[float, float, float]:
        """Exposed seconds once a step, exposed seconds of each microbatch, and hidden seconds of the step."""
        layout, constants = job.layout, self.efficiency
        traffic = data_seconds(job, self.collectives, stage)
        once, each = traffic.gather + traffic.reduce, traffic.gather_each + traffic.scatter_each
        each += self._offload_seconds(job, stage)
        if not once and not each:
            return 0.0, 0.0, 0.0
        if not layout.overlap_gradients:
            return once, each, 0.0
        each_hidden = hidden_behind(each, constants.sharded_hidden * microbatch)
        # nothing hides twice behind the same computation, or recomputing more would shorten a step
        available = constants.data_hidden * (1 - each_hidden / microbatch)
        gather_hidden = hidden_behind(traffic.gather, available * forward)
        reduce_hidden = hidden_behind(traffic.reduce, available * (microbatch - forward))
        hidden = gather_hidden + reduce_hidden
        return once - hidden, each - each_hidden, hidden + layout.microbatches * each_hidden

    def _offload_seconds(self, job: Job, stage: Stage) -> float:
        """Seconds in which one microbatch moves weights from the host, for each pass, and gradients to it."""
        offload = job.layout.offload
        if offload in ("none", "optimizer"):
            return 0.0
        parameters, gradients, _ = states_of_rank(job, stage)
        return (gradients + (2 * parameters if offload == "all" else 0.0)) / self._host_rate(job)

    def _host_rate(self, job: Job) -> float:
        """Bytes/s between a GPU and host memory; UsageError where the catalogue does not have it."""
        machine = self.cluster.machine
        if machine.pcie is None:
            raise UsageError(
                f"offload={job.layout.offload!r}: the bandwidth between {machine.name} and its host is not in the "
                "catalogue. Nearest: offload=none."
            )
        return OFFLOAD_SHARE * machine.pcie.bandwidth

    def optimizer_seconds(self, job: Job, stage: Stage) -> float:
        """Seconds of the optimizer: states read and written, gradients read twice, weights written."""
        layout, precision, machine = job.layout, job.precision, self.cluster.machine
        expert_ranks = 1 if layout.sharding == "none" else max(1, layout.edp)
        updated = stage.dense_weights / layout.shard_ranks + stage.expert_weights / expert_ranks
        weights = stage.dense_weights + stage.expert_weights
        summed = updated if layout.sharding in ("zero2", "shard_grad_op", "zero3", "hsdp") else weights
        moved = updated * (2 * precision.optimizer + precision.parameters) + 3 * summed * precision.gradients
        assert machine.theoretical is not None
        seconds = job.trainable * moved / (self.efficiency.memory * machine.theoretical.bandwidth)
        seconds *= self.efficiency.optimizer_scale
        if layout.offload != "none":
            seconds += job.trainable * 2 * updated * precision.optimizer / self._host_rate(job)
        return seconds


def _accumulates(job: Job) -> bool:
    """Whether gradients are not summed over microbatches in memory: part of the keys of memoized times."""
    return job.layout.gathers_weights or job.layout.microbatches == 1


def _joined(first: float, second: float) -> float:
    """The p-norm of two times: the larger one, and a little more where they are near each other."""
    return float((first**LAUNCH_SHARPNESS + second**LAUNCH_SHARPNESS) ** (1 / LAUNCH_SHARPNESS))


def hidden_behind(communication: float, available: float) -> float:
    """Seconds of `communication` that hide behind `available` seconds: the smaller of the two, less near equality."""
    if communication <= 0 or available <= 0:
        return 0.0
    ratio = min(communication, available) / max(communication, available)
    hidden: float = min(communication, available) / (1 + ratio**HIDING_SHARPNESS) ** (1 / HIDING_SHARPNESS)
    return hidden


def waiting_share(layout: Layout) -> float:
    """Share of a microbatch of each other stage for which a stage waits, before what the schedule fills.

    All of it in 1F1B. In DualPipe, microbatches come from both ends: (p/2 - 1) passes of twice the time in place of
    p - 1 (arXiv:2412.19437, table 2, where a pass and its backward pass take FB + B).
    """
    return (layout.pp - 2) / (layout.pp - 1) if layout.schedule == "dualpipe" and layout.pp > 1 else 1.0


def filled_seconds(layout: Layout, forward: float, weights: float) -> float:
    """Seconds of a microbatch of one stage for which others need not wait, as gradients of weights come later.

    With forward passes F, backward passes B for inputs and W for weights, 1F1B waits for F + B + W of each other stage
    and ZB-H1 for F + B - W (arXiv:2401.10241): the next stage does not wait for W, and fills its own waiting with the W
    of as many microbatches as there are. DualPipe: 2 (F + B + W) - F - 3 W, of half as many stages.
    """
    if layout.schedule == "zero-bubble":
        return weights * (1 + min(1.0, layout.microbatches / (layout.pp - 1)))
    if layout.schedule == "dualpipe":
        return waiting_share(layout) / 2 * (forward + 3 * weights)
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySeconds:
    """Some layers for one microbatch: computation, and communication with what of it is exposed."""

    compute: ComputeSeconds
    recompute: float
    tensor: float
    tensor_exposed: float
    context: float
    context_exposed: float
    experts: float
    experts_exposed: float
    trains_weights: bool

    @property
    def forward(self) -> float:
        """The forward pass, with its share of the exposed communication."""
        return self.compute.forward + self.tensor_exposed / 2 + self.context_exposed / 3 + self.experts_exposed / 2

    @property
    def weights(self) -> float:
        """Gradients of weights: GEMMs of the size of the forward pass."""
        return self.compute.gemm_forward if self.trains_weights else 0.0

    @property
    def seconds(self) -> float:
        """Seconds for which the device is busy."""
        exposed = self.tensor_exposed + self.context_exposed + self.experts_exposed
        return self.compute.total + self.recompute + exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """What all stages of a job are made of: seconds for one microbatch on one rank."""

    mixers: dict[str, ComputeSeconds]
    """One mixer of each kind."""
    feeds: dict[str, ComputeSeconds]
    output: ComputeSeconds
    mla_up: float
    """Forward pass of the up-projections of one latent attention layer."""
    tensor: float
    """Tensor parallelism of one block, forward and backward."""
    context: float
    """Context parallelism of one attention layer."""
    experts: float
    """Dispatch and combine of one expert layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One pipeline stage: seconds for each microbatch, and once per step where that is said."""

    index: int
    compute: ComputeSeconds
    recompute: float
    launches: float
    tensor: float
    tensor_exposed: float
    context: float
    context_exposed: float
    experts: float
    experts_exposed: float
    pipeline: float
    pipeline_exposed: float
    data_each: float
    data_once: float
    """Exposed, once per step."""
    data_hidden: float
    optimizer: float
    """Once per step."""
    filled: float
    """Seconds of each microbatch for which other stages need not wait."""

    @property
    def microbatch(self) -> float:
        """Seconds of one microbatch."""
        exposed = self.tensor_exposed + self.context_exposed + self.experts_exposed + self.pipeline_exposed
        return self.compute.total + self.recompute + self.launches + exposed + self.data_each

    def waiting(self, share: float) -> float:
        """Seconds for which each other stage waits for this one, at a `waiting_share`."""
        return max(0.0, share * self.microbatch - self.filled)

    def step(self, microbatches: int) -> float:
        """Seconds of this stage in one step, without waiting for others."""
        return microbatches * self.microbatch + self.data_once + self.optimizer


@dataclass(slots=True)
class ComputeSeconds:
    """Seconds of computation, forward and backward together."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Memory-bound kernels."""
    casts: float = 0.0
    forward: float = 0.0
    """The forward pass of the four."""
    gemm_forward: float = 0.0

    @property
    def total(self) -> float:
        """The four kinds together."""
        return self.gemm + self.attention + self.memory + self.casts

    def scaled(self, factor: float) -> ComputeSeconds:
        """All of it `factor` times as long."""
        scaled = ComputeSeconds()
        scaled.add(self, factor)
        return scaled

    def add(self, other: ComputeSeconds, times: float) -> None:
        """Add `times` of another piece of work."""
        self.gemm += times * other.gemm
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.casts += times * other.casts
        self.forward += times * other.forward
        self.gemm_forward += times * other.gemm_forward


class TrainingRates:
    """FLOP/s and bytes/s that a machine reaches for one precision and kind of software."""

    def __init__(self, machine: Machine, job: Job, efficiency: Efficiency) -> None:
        self.efficiency = efficiency
        eager = job.software == "eager"
        dtype = job.precision.gemm_dtype
        assert machine.theoretical is not None
        if job.precision.microscaled and "float4" not in machine.theoretical.matrix:
            nearest = "fp8-row" if "float8" in machine.theoretical.matrix else "bf16"
            raise UsageError(
                f"precision={job.precision.name!r}: {machine.name} has no GEMMs with a scale for each block. "
                f"Nearest: precision={nearest!r}."
            )
        self.gemm = gemm_rate(machine, dtype, job.year, efficiency)
        wide = dtype if dtype in ("bfloat16", "float16", "tfloat32") else "bfloat16"
        self.wide_gemm = gemm_rate(machine, wide, job.year, efficiency)
        """GEMMs that stay in 16 bits: the router and the output layer."""
        self.attention = attention_rate(machine, job.year, efficiency)
        self.bandwidth = efficiency.memory * machine.theoretical.bandwidth
        self.backward = 2.0 if job.trains_weights else 1.0
        """Backward GEMMs to one forward; adapters need no gradients of weights."""
        self.input_bytes = min(2.0, job.precision.saved)
        # A microbatch's gradients are added to those of the step: read and written, less the write that a GEMM has
        # anyway; eager code has a kernel for it. Weights that are gathered layer by layer are reduced instead.
        accumulated = 2.0 * job.precision.gradients + (2.0 if eager else -self.input_bytes)
        self.accumulated = accumulated if job.trains_weights and not _accumulates(job) else 0.0
        """Bytes per weight of that."""
        self.traffic = efficiency.traffic_eager if eager else efficiency.traffic_fused
        scaling = job.precision.scaling
        self.quantize = 0.0 if scaling == "none" else float(getattr(efficiency, f"quantize_{scaling}"))


def recomputed_flops(model: Model, sequence: int, recompute: tuple[str, ...]) -> float:
    """FLOPs of a token that the backward pass computes again where all layers recompute these modules."""
    flops = forward_flops(model, sequence)
    if "layer" in recompute:
        return flops.total - flops.output
    up = [2.0 * inputs * outputs for name, inputs, outputs in attention_matrices(model) if name.endswith("up")]
    modules = {
        "attention": flops.scores + flops.scan,
        "mla_up": model.attention_layers * sum(up) if model.kv_rank else 0.0,
        "feed": flops.dense,
        "experts": flops.experts + flops.shared,
        "ops": flops.scan + (flops.gemm - flops.output) / 2,  # every second GEMM is saved
    }
    return sum(modules.get(module, 0.0) for module in recompute)


def mixer_seconds(job: Job, kind: str, rates: TrainingRates) -> ComputeSeconds:
    """One mixer for one microbatch on one rank."""
    model, layout = job.model, job.layout
    rows, tp = float(job.microbatch_tokens), layout.tp
    spread = tp if layout.sequence_parallel else 1
    seconds = ComputeSeconds()
    _add_traffic(
        seconds, rates, BLOCK_FORWARD * rows * model.hidden / spread, BLOCK_BACKWARD * rows * model.hidden / spread
    )
    if kind == "M":
        for name, inputs, outputs in state_space_matrices(model):
            split = (inputs, outputs / tp) if name == "in" else (inputs / tp, outputs)
            _add_gemm(seconds, rates, rows, *split)
        inner = (model.ssm_heads * model.ssm_head_dim + 2 * model.ssm_groups * model.ssm_state) / tp
        unit = rates.efficiency.state_space * rows * inner / rates.bandwidth
        seconds.memory += SCAN_TOTAL * unit
        seconds.forward += SCAN_FORWARD * unit
        scan = scan_flops(model) * rows / tp / (SCAN_SHARE * rates.attention)
        seconds.attention += (1 + BACKWARD_ATTENTION) * scan
        seconds.forward += scan
        return seconds
    for name, inputs, outputs in attention_matrices(model):
        if name.endswith("down"):
            _add_gemm(seconds, rates, rows / spread, inputs, outputs)
        elif name == "output":
            _add_gemm(seconds, rates, rows, inputs / tp, outputs)
        else:
            _add_gemm(seconds, rates, rows, inputs, outputs / tp)
    rotated = 0 if model.positions else model.heads * model.head_dim + model.kv_heads * model.head_dim
    _add_traffic(seconds, rates, ROTARY_BYTES * rows * rotated / tp, ROTARY_BYTES * rows * rotated / tp)
    if job.software == "unfused":  # all scores are computed, masked ones too
        scores = 2 * score_flops(model, kind, job.sequence) * rows / tp / (SCORE_SHARE * rates.wide_gemm)
        one_pass = 2.0 * rows * model.heads / tp * job.sequence / rates.bandwidth
        seconds.attention += 3 * scores + SCORE_PASSES * one_pass
        seconds.forward += scores + SCORE_PASSES_FORWARD * one_pass
        return seconds
    scores = score_flops(model, kind, job.sequence) * rows / tp / rates.attention
    channels = model.heads * (model.head_dim + model.value_dim) + model.kv_heads * (model.head_dim + model.value_dim)
    traffic = 2.0 * rows * channels / tp / rates.bandwidth
    seconds.attention += (1 + BACKWARD_ATTENTION) * scores + 3.0 * traffic
    seconds.forward += scores + traffic
    return seconds


def _mla_up_seconds(job: Job, rates: TrainingRates) -> float:
    seconds = ComputeSeconds()
    for name, inputs, outputs in attention_matrices(job.model) if job.model.kv_rank else ():
        if name.endswith("up"):
            _add_gemm(seconds, rates, float(job.microbatch_tokens), inputs, outputs / job.layout.tp)
    return seconds.forward


def feed_seconds(job: Job, kind: str, rates: TrainingRates) -> ComputeSeconds:
    """One feed for one microbatch on one rank."""
    model, layout = job.model, job.layout
    rows, tp = float(job.microbatch_tokens), layout.tp
    spread = tp if layout.sequence_parallel else 1
    seconds = ComputeSeconds()
    _add_traffic(
        seconds, rates, BLOCK_FORWARD * rows * model.hidden / spread, BLOCK_BACKWARD * rows * model.hidden / spread
    )
    if kind == "D":
        _add_feed(seconds, rates, model, rows, model.hidden, model.intermediate / tp)
        return seconds
    seconds.add(_routed_experts_seconds(job, rates, rows / spread * model.active_experts), 1.0)
    _add_gemm(seconds, rates, rows / spread, model.hidden, model.experts, wide=True)  # the router
    if model.shared_intermediate:
        _add_feed(seconds, rates, model, rows, model.hidden, model.shared_intermediate / tp)
    if model.latent:
        _add_gemm(seconds, rates, rows / spread, model.hidden, model.latent)
        _add_gemm(seconds, rates, rows / spread, model.latent, model.hidden)
    return seconds


def _routed_experts_seconds(job: Job, rates: TrainingRates, routed: float) -> ComputeSeconds:
    """The experts that `routed` copies of tokens visit, with permuting and combining."""
    model, layout, efficiency = job.model, job.layout, rates.efficiency
    width = model.latent or model.hidden
    experts = ComputeSeconds()
    _add_feed(
        experts,
        rates,
        model,
        routed * layout.etp,
        width,
        model.expert_intermediate / layout.etp,
        groups=model.experts / layout.ep,
        relative_rate=efficiency.expert_gemm,
    )
    tokens = efficiency.expert_traffic * 4.0 * routed * width / rates.bandwidth
    experts.memory += 4 * tokens  # permuted and combined, forward and backward
    experts.forward += 2 * tokens
    if job.year >= GRAPHED_EXPERTS_YEAR and model.gated:  # one kernel for activation, casts and the order of tokens
        saved = (1 - efficiency.expert_fused) * (experts.memory + experts.casts)
        experts.memory *= efficiency.expert_fused
        experts.casts *= efficiency.expert_fused
        experts.forward -= saved / 2
    if model.expert_bias:  # the bias, and the clamped activation that goes with it, are separate operators
        inner = routed * model.expert_intermediate
        forward, backward = UNFUSED_ACTIVATION * EXPERT_BIAS_FORWARD, UNFUSED_ACTIVATION * EXPERT_BIAS_BACKWARD
        _add_traffic(experts, rates, forward * inner, backward * inner)
    return experts


def output_seconds(job: Job, rates: TrainingRates) -> ComputeSeconds:
    """The output layer and the loss for one microbatch on one rank."""
    model, tp = job.model, job.layout.tp
    rows = float(job.microbatch_tokens)
    if model.image_tokens:
        rows /= model.image_tokens
    seconds = ComputeSeconds()
    _add_gemm(seconds, rates, rows, model.hidden, model.vocabulary / tp, wide=True)
    logits = rows * model.vocabulary / tp
    _add_traffic(seconds, rates, LOGITS_FORWARD * logits, LOGITS_BACKWARD * logits)
    return seconds


def _add_feed(
    seconds: ComputeSeconds,
    rates: TrainingRates,
    model: Model,
    rows: float,
    hidden: float,
    inner: float,
    *,
    groups: float = 1.0,
    relative_rate: float = 1.0,
) -> None:
    ups = 2 if model.gated else 1
    _add_gemm(seconds, rates, rows, hidden, ups * inner, groups=groups, relative_rate=relative_rate)
    _add_gemm(seconds, rates, rows, inner, hidden, groups=groups, relative_rate=relative_rate)
    _add_traffic(seconds, rates, 2.0 * (ups + 1) * rows * inner, 2.0 * (2 * ups + 1) * rows * inner)


def _add_gemm(
    seconds: ComputeSeconds,
    rates: TrainingRates,
    rows: float,
    inputs: float,
    outputs: float,
    *,
    groups: float = 1.0,
    wide: bool = False,
    relative_rate: float = 1.0,
) -> None:
    """Add one GEMM with `groups` weight matrices, forward and backward, with its casts."""
    flops = 2.0 * rows * inputs * outputs
    rate = (rates.wide_gemm if wide else rates.gemm) * relative_rate
    size = 2.0 if wide else rates.input_bytes
    weights = groups * inputs * outputs
    traffic = rows * inputs * size + weights * size + 2.0 * rows * outputs
    forward = flops / rate + traffic / rates.bandwidth
    seconds.gemm += (1.0 + rates.backward) * forward + rates.accumulated * weights / rates.bandwidth
    seconds.forward += forward
    seconds.gemm_forward += forward
    if rates.quantize and not wide:
        cast = rates.quantize * rows * (2.0 + 2 * size) * inputs / rates.bandwidth
        backward_cast = rates.quantize * rows * (2.0 + 2 * size) * outputs / rates.bandwidth
        seconds.casts += cast + backward_cast
        seconds.forward += cast


def _add_traffic(seconds: ComputeSeconds, rates: TrainingRates, forward_bytes: float, backward_bytes: float) -> None:
    """Add memory-bound kernels."""
    unit = rates.traffic / rates.bandwidth
    seconds.memory += unit * (forward_bytes + backward_bytes)
    seconds.forward += unit * forward_bytes


class TrainingCollectives:
    """Times of collectives on one cluster, at the rates that training reaches across nodes."""

    def __init__(self, times: CollectiveTimes, efficiency: Efficiency) -> None:
        self.times, self.efficiency = times, efficiency
        self.domain = times.cluster.domain

    def __call__(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of one collective over ranks `stride` apart."""
        return self._seconds(op, size, ranks, stride, self.efficiency.network)

    def exchange(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all of tokens."""
        return self._seconds("all_to_all", size, ranks, stride, self.efficiency.expert_network)

    def in_pieces(self, count: float, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of `size` bytes in `count` collectives, one after the other."""
        return count * self(op, size / count, ranks, stride) if count > 0 else 0.0

    def _seconds(self, op: str, size: float, ranks: int, stride: int, network: float) -> float:
        if ranks <= 1 or size <= 0:
            return 0.0
        seconds = self.times(op, size, ranks, stride)
        return seconds / network if ranks * stride > self.domain else seconds


def tensor_seconds(job: Job, collectives: TrainingCollectives) -> float:
    """Tensor parallelism of one block for one microbatch, forward and backward.

    With sequence parallelism an all-gather before and a reduce-scatter after each block, and both again backward;
    without it an all-reduce forward and one backward. Routed experts have theirs inside the expert.
    """
    layout, model = job.layout, job.model
    if layout.tp == 1:
        return 0.0
    size = 2.0 * job.microbatch_tokens * model.hidden
    if layout.sequence_parallel:
        gather = collectives("all_gather", size, layout.tp, 1)
        scatter = collectives("reduce_scatter", size, layout.tp, 1)
        return 2 * gather + 2 * scatter
    return 2 * collectives("all_reduce", size, layout.tp, 1)


def context_seconds(job: Job, collectives: TrainingCollectives) -> float:
    """Context parallelism of one attention layer for one microbatch.

    Keys and values go around the ring forward and again backward, their gradients with them.
    """
    layout, model = job.layout, job.model
    if layout.cp == 1:
        return 0.0
    channels = model.kv_heads * (model.head_dim + model.value_dim) / layout.tp
    if model.kv_rank:
        channels = model.kv_rank + model.rope_dim
    size = 2.0 * job.microbatch_tokens * max(channels, 1.0)
    hop = collectives("send_recv", size, 2, layout.tp)
    return 3 * (layout.cp - 1) * hop


def expert_seconds(job: Job, collectives: TrainingCollectives) -> float:
    """Expert parallelism of one expert layer for one microbatch: dispatch and combine, forward and backward."""
    layout, model = job.layout, job.model
    if not model.is_moe:
        return 0.0
    spread = layout.tp if layout.sequence_parallel else 1
    width = model.latent or model.hidden
    routed = job.microbatch_tokens / spread * model.active_experts * width
    sent = routed * _deduplicated_share(job, collectives.domain)
    dispatch = collectives.exchange(sent * min(2.0, max(1.0, job.precision.saved)), layout.ep, layout.etp)
    combine = collectives.exchange(2.0 * sent, layout.ep, layout.etp)
    inside = 0.0
    if layout.etp > 1:
        size = 2.0 * routed * layout.etp
        inside = collectives("all_gather", size, layout.etp, 1) + collectives("reduce_scatter", size, layout.etp, 1)
    return 2 * (dispatch + combine + inside)


def _deduplicated_share(job: Job, domain: int) -> float:
    """Share of the routed tokens that is sent where a token goes once to each place that has experts for it.

    Dispatchers since 2025 (DeepEP, HybridEP) send a token once to every node, and inside a node once to every rank.
    Older ones send it to every expert.
    """
    layout, model = job.layout, job.model
    if job.year < DEDUPLICATED_YEAR and not layout.routed_nodes:
        return 1.0
    domains = max(1, -(-layout.ep * layout.etp // domain))
    if domains == 1:
        return _places_reached(layout.ep, model.active_experts) / model.active_experts
    plain = model.active_experts * (domains - 1) / domains
    reached = _places_reached(domains, model.active_experts)
    if layout.routed_nodes:
        reached = min(reached, float(layout.routed_nodes))
    return reached * (domains - 1) / domains / plain


def _places_reached(places: int, experts: int) -> float:
    """Expected number of places that have one of `experts` experts, which are chosen at random."""
    return float(places * (1 - (1 - 1 / places) ** experts))


def pipeline_seconds(job: Job, collectives: TrainingCollectives) -> float:
    """Sends of one microbatch between stages, forward and backward, through all pieces of a stage."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    size = 2.0 * job.microbatch_tokens * job.model.hidden / (layout.tp if layout.scatter_pipeline else 1)
    stride = layout.tp * layout.cp * layout.dp
    return 2 * layout.virtual * collectives("send_recv", size, 2, min(stride, layout.gpus // 2))


@dataclass(slots=True)
class DataTraffic:
    """Seconds of data-parallel communication, for every microbatch (`*_each`) and once per step."""

    gather_each: float = 0.0
    scatter_each: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0


def data_seconds(job: Job, collectives: TrainingCollectives, stage: Stage) -> DataTraffic:
    """Gradients summed, and weights gathered, over the data-parallel ranks."""
    layout, precision = job.layout, job.precision
    result = DataTraffic()
    experts = stage.expert_weights if layout.ep * layout.etp > 1 else 0.0
    dense = stage.dense_weights + stage.expert_weights - experts
    meshes = ((dense, layout.state_ranks, layout.tp), (experts, layout.edp, layout.ep * layout.etp))
    for weights, ranks, stride in meshes:
        if ranks <= 1 or not weights:
            continue
        gradients, parameters = weights * precision.gradients * job.trainable, weights * precision.wire
        sharded = ("zero2", "shard_grad_op", "zero3")
        inside = ranks if layout.sharding in sharded else math.gcd(ranks, layout.shard_ranks)
        outside, outer_stride = ranks // inside, stride * inside
        if layout.sharding in ("none", "zero1"):
            count = max(1.0, round(weights / max(BUCKET, BUCKET_PER_RANK * ranks)))
            if layout.sharding == "none":
                result.reduce += collectives.in_pieces(count, "all_reduce", gradients, ranks, stride)
                continue
            if job.software == "eager":
                count = MATRICES_PER_LAYER * max(1.0, stage.layers)
            result.reduce += collectives.in_pieces(count, "reduce_scatter", gradients, inside, stride)
            result.gather += collectives.in_pieces(count, "all_gather", parameters * job.trainable, inside, stride)
        else:
            count = max(1.0, stage.layers) * (4 if job.software == "unfused" else 1)
            times = {"zero2": 0, "shard_grad_op": 1}.get(layout.sharding, 2)
            if layout.sharding == "zero2":
                result.gather += collectives.in_pieces(count, "all_gather", parameters * job.trainable, inside, stride)
            if job.software == "unfused" and layout.recomputes("layer"):
                times += 1  # early ZeRO-3 released the weights between recomputing a layer and its backward pass
            result.gather_each += times * collectives.in_pieces(count, "all_gather", parameters, inside, stride)
            # a piece of an interleaved stage runs pp microbatches in a row, and its gradients are reduced after them
            row = layout.pp if layout.sharding == "zero2" and layout.virtual > 1 else 1
            result.scatter_each += collectives.in_pieces(count, "reduce_scatter", gradients, inside, stride) / row
            if job.software == "unfused":
                result.gather_each += times * count * (FETCH_SECONDS + FETCH_SECONDS_PER_RANK * ranks)
                result.scatter_each += count * (FETCH_SECONDS + FETCH_SECONDS_PER_RANK * ranks)
        if inside < ranks:
            size = gradients / inside
            result.reduce += collectives.in_pieces(count, "all_reduce", size, outside, outer_stride)
    return result
