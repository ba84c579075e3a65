"""Seconds of one training step, as parts that sum to it, and the communication that hides behind them.

A GEMM takes its FLOPs at the rate that large GEMMs reach, and its traffic at the memory's: the sum of the two is near
the first for large matrices and near the second for thin ones, which is how utilization falls with size.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline; the experts' mesh has its own
order over the same GPUs: tensor inside an expert, experts, data, pipeline. Neighbors in a group lie as far apart as the
product of the inner degrees, which decides what stays inside a node or a rack.

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
from dataclasses import dataclass

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
    load_efficiency,
    product_rate,
)
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Stage, stage

PARTS = (
    "products", "attention", "memory-bound", "casts", "recompute", "launches", "tensor", "context", "experts",
    "pipeline", "bubble", "data", "optimizer", "step", "stragglers",
)  # fmt: skip
"""Names of the parts of a step, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """One step: its parts sum to `seconds`; `hidden` is communication that passes behind them."""

    seconds: float
    parts: dict[str, float]
    hidden: dict[str, float]
    tokens: int
    gpus: int
    model_flops: float
    """Of the step, all GPUs: three times the forward pass, attention counted under its mask."""
    hardware_flops: float
    """With what is computed again."""
    peak: float
    """FLOP/s of one GPU in the precision of the products, by the datasheet."""

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: of the peak in the precision of the products; causal attention counts half."""
        return self.model_flops / (self.seconds * self.gpus * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputation counts."""
        return self.hardware_flops / (self.seconds * self.gpus * self.peak)


UNFUSED_ACTIVATION = 5.0
"""Traffic of an activation that is written as single operators, beyond that of one kernel."""


@dataclass(slots=True)
class ComputeSeconds:
    """Seconds of one piece of work, forward and backward together where nothing else is said."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    quantize: float = 0.0
    forward: float = 0.0
    """Share of the sum of the four that is the forward pass, in seconds."""

    @property
    def total(self) -> float:
        """The four kinds together."""
        return self.products + self.attention + self.memory + self.quantize

    def add(self, other: ComputeSeconds, times: float) -> None:
        """Adds `times` of another piece."""
        self.products += times * other.products
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.quantize += times * other.quantize
        self.forward += times * other.forward


class TrainingRates:
    """What a machine reaches under given constants, for one precision and kind of software."""

    def __init__(self, machine: Machine, job: Job, efficiency: Efficiency) -> None:
        self.efficiency = efficiency
        self.eager = job.software == "eager"
        wide = job.precision.products if job.precision.products in ("bfloat16", "float16", "tfloat32") else "bfloat16"
        self.products = product_rate(machine, job.precision.products, job.year, efficiency)
        self.wide = product_rate(machine, wide, job.year, efficiency)
        self.attention = attention_rate(machine, job.year, efficiency)
        assert machine.theoretical is not None
        self.bandwidth = efficiency.memory * machine.theoretical.bandwidth
        self.backward = 2.0 if job.trainable > 0.5 else 1.0
        """Products backward to one forward; adapters leave the weights alone, and their gradients out."""
        self.input_bytes = min(2.0, job.precision.saved)
        # gradients of a microbatch are added to those of the step: read and written, but for the write that a product
        # has anyway; in eager code by a kernel of its own. What is gathered layer by layer is reduced instead.
        summed = 2.0 * job.precision.gradients + (2.0 if self.eager else -self.input_bytes)
        gathered = job.layout.sharding in ("zero3", "hsdp") or job.trainable <= 0.5
        self.summed = 0.0 if gathered or job.layout.microbatches == 1 else summed
        self.traffic = efficiency.traffic_eager if self.eager else efficiency.traffic_fused
        scaling = job.precision.scaling
        self.quantize = 0.0 if scaling == "none" else float(getattr(efficiency, f"quantize_{scaling}"))


def add_gemm(
    seconds: ComputeSeconds,
    rates: TrainingRates,
    rows: float,
    inputs: float,
    outputs: float,
    *,
    groups: float = 1.0,
    wide: bool = False,
    slow: float = 1.0,
) -> None:
    """Add one GEMM of `groups` weights, forward and both backward ones, with its casts."""
    flops = 2.0 * rows * inputs * outputs
    rate = (rates.wide if wide else rates.products) * slow
    size = 2.0 if wide else rates.input_bytes
    weights = groups * inputs * outputs
    traffic = rows * inputs * size + weights * size + 2.0 * rows * outputs
    forward = flops / rate + traffic / rates.bandwidth
    seconds.products += (1.0 + rates.backward) * forward + rates.summed * weights / rates.bandwidth
    seconds.forward += forward
    if rates.quantize and not wide:
        casts = rates.quantize * rows * (2.0 + 2 * size) * inputs / rates.bandwidth
        back = rates.quantize * rows * (2.0 + 2 * size) * outputs / rates.bandwidth
        seconds.quantize += casts + back
        seconds.forward += casts


def add_memory_traffic(
    seconds: ComputeSeconds, rates: TrainingRates, forward_bytes: float, backward_bytes: float
) -> None:
    """Adds memory-bound work."""
    unit = rates.traffic / rates.bandwidth
    seconds.memory += unit * (forward_bytes + backward_bytes)
    seconds.forward += unit * forward_bytes


def mixer_seconds(job: Job, kind: str, rates: TrainingRates) -> ComputeSeconds:
    """One mixer for one microbatch on one rank."""
    model, layout = job.model, job.layout
    rows, tp = float(job.microbatch_tokens), layout.tp
    spread = tp if layout.sequence_parallel else 1
    seconds = ComputeSeconds()
    hidden = model.hidden
    # residual and norm: read and written once each forward; three reads and two writes of gradients and inputs back
    add_memory_traffic(seconds, rates, 8.0 * rows * hidden / spread, 12.0 * rows * hidden / spread)
    if kind == "M":
        for name, inputs, outputs in state_space_matrices(model):
            split = (inputs, outputs / tp) if name == "in" else (inputs / tp, outputs)
            add_gemm(seconds, rates, rows, *split)
        inner = (model.ssm_heads * model.ssm_head_dim + 2 * model.ssm_groups * model.ssm_state) / tp
        unit = rates.efficiency.state_space * rows * inner / rates.bandwidth
        seconds.memory += 48.0 * unit
        seconds.forward += 16.0 * unit
        scan = scan_flops(model) * rows / tp / (0.5 * rates.attention)
        seconds.attention += (1 + BACKWARD_ATTENTION) * scan
        seconds.forward += scan
        return seconds
    for name, inputs, outputs in attention_matrices(model):
        if name.endswith("down"):
            add_gemm(seconds, rates, rows / spread, inputs, outputs)
        elif name == "output":
            add_gemm(seconds, rates, rows, inputs / tp, outputs)
        else:
            add_gemm(seconds, rates, rows, inputs, outputs / tp)
    rotated = model.heads * model.head_dim + model.kv_heads * model.head_dim
    if model.positions:
        rotated = 0
    add_memory_traffic(seconds, rates, 4.0 * rows * rotated / tp, 4.0 * rows * rotated / tp)
    if job.software == "unfused":
        # two products of all scores, masked ones too, and five passes over them forward (scores, mask and softmax,
        # dropout), six backward
        scores = 2 * score_flops(model, kind, job.sequence) * rows / tp / (0.6 * rates.wide)
        passes = 2.0 * rows * model.heads / tp * job.sequence / rates.bandwidth
        seconds.attention += 3 * scores + 11 * passes
        seconds.forward += scores + 5 * passes
        return seconds
    scores = score_flops(model, kind, job.sequence) * rows / tp / rates.attention
    held = model.heads * (model.head_dim + model.value_dim) + model.kv_heads * (model.head_dim + model.value_dim)
    traffic = 2.0 * rows * held / tp / rates.bandwidth
    seconds.attention += (1 + BACKWARD_ATTENTION) * scores + 3.0 * traffic
    seconds.forward += scores + traffic
    return seconds


def feed_seconds(job: Job, kind: str, rates: TrainingRates) -> ComputeSeconds:
    """One feed for one microbatch on one rank."""
    model, layout = job.model, job.layout
    rows, tp = float(job.microbatch_tokens), layout.tp
    spread = tp if layout.sequence_parallel else 1
    seconds = ComputeSeconds()
    add_memory_traffic(seconds, rates, 8.0 * rows * model.hidden / spread, 12.0 * rows * model.hidden / spread)
    if kind == "D":
        _add_feed(seconds, rates, model, rows, model.hidden, model.intermediate / tp)
        return seconds
    efficiency = rates.efficiency
    width = model.latent or model.hidden
    routed = rows / spread * model.active_experts
    local = model.experts / layout.ep
    experts = ComputeSeconds()
    _add_feed(experts, rates, model, routed * layout.etp, width, model.expert_intermediate / layout.etp, groups=local,
          slow=efficiency.expert_products)  # fmt: skip
    late = job.year >= GRAPHED_EXPERTS_YEAR
    tokens = efficiency.expert_traffic * 4.0 * routed * width / rates.bandwidth
    experts.memory += 4 * tokens  # permuted and combined, forward and backward
    experts.forward += 2 * tokens
    if late and model.gated:  # one kernel for the activation, the casts and the order of tokens
        saved = (1 - efficiency.expert_fused) * (experts.memory + experts.quantize)
        experts.memory *= efficiency.expert_fused
        experts.quantize *= efficiency.expert_fused
        experts.forward -= saved / 2
    if model.expert_bias:  # the bias and the clamped activation that goes with it are operators of their own
        inner = routed * model.expert_intermediate
        add_memory_traffic(experts, rates, UNFUSED_ACTIVATION * 6.0 * inner, UNFUSED_ACTIVATION * 10.0 * inner)
    seconds.add(experts, 1.0)
    add_gemm(seconds, rates, rows / spread, model.hidden, model.experts, wide=True)
    if model.shared_intermediate:
        _add_feed(seconds, rates, model, rows, model.hidden, model.shared_intermediate / tp)
    if model.latent:
        add_gemm(seconds, rates, rows / spread, model.hidden, width)
        add_gemm(seconds, rates, rows / spread, width, model.hidden)
    return seconds


def _add_feed(seconds: ComputeSeconds, rates: TrainingRates, model: Model, rows: float, hidden: float, inner: float, *,
          groups: float = 1.0, slow: float = 1.0) -> None:  # fmt: skip
    ups = 2 if model.gated else 1
    add_gemm(seconds, rates, rows, hidden, ups * inner, groups=groups, slow=slow)
    add_gemm(seconds, rates, rows, inner, hidden, groups=groups, slow=slow)
    add_memory_traffic(seconds, rates, 2.0 * (ups + 1) * rows * inner, 2.0 * (2 * ups + 1) * rows * inner)


def output_seconds(job: Job, rates: TrainingRates) -> ComputeSeconds:
    """The output layer and the loss for one microbatch on one rank."""
    model, tp = job.model, job.layout.tp
    rows = float(job.microbatch_tokens)
    if model.image_tokens:
        rows /= model.image_tokens
    seconds = ComputeSeconds()
    add_gemm(seconds, rates, rows, model.hidden, model.vocabulary / tp, wide=True)
    logits = rows * model.vocabulary / tp
    add_memory_traffic(
        seconds, rates, 10.0 * logits, 6.0 * logits
    )  # to float32, the maximum, the sum; gradients in place
    return seconds


@dataclass(slots=True)
class Traffic:
    """Seconds of one kind of communication: in all, and those that nothing hides."""

    total: float = 0.0
    exposed: float = 0.0

    @property
    def hidden(self) -> float:
        """Seconds that pass behind computation."""
        return self.total - self.exposed


BUCKET, BUCKET_PER_RANK = 40e6, 1e6
"""Weights whose gradients are reduced at once: Megatron's least bucket, and what it gives each data-parallel rank."""
DEDUPLICATED_YEAR = 2025.6
"""From when on tokens cross the network once for each node (DeepEP, HybridEP in Megatron)."""
FETCH_SECONDS, FETCH_SECONDS_PER_RANK = 3e-3, 5e-6
"""Seconds beyond the collective, and for each rank, that ZeRO-3 of 2021 took to fetch or reduce one matrix: hooks in
Python, no prefetching, and a tensor of its own for the piece of every rank. Assumed; later software gathers a layer at
once."""
MATRICES_PER_LAYER = 7
"""Matrices of one layer: as many collectives, where software has no buckets."""


class TrainingCollectives:
    """Collective times on one cluster, with what training reaches of them across nodes."""

    def __init__(self, times: CollectiveTimes, efficiency: Efficiency) -> None:
        self.times, self.efficiency = times, efficiency
        self.domain = times.cluster.domain

    def __call__(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of one collective over ranks `stride` apart."""
        if ranks <= 1 or size <= 0:
            return 0.0
        seconds = self.times(op, size, ranks, stride)
        return seconds / self.efficiency.network if ranks * stride > self.domain else seconds

    def exchange(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all of tokens."""
        if ranks <= 1 or size <= 0:
            return 0.0
        seconds = self.times("all_to_all", size, ranks, stride)
        return seconds / self.efficiency.expert_network if ranks * stride > self.domain else seconds

    def pieces(self, count: float, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of `size` bytes in `count` collectives, one after the other."""
        return count * self(op, size / count, ranks, stride) if count > 0 else 0.0


def tensor_seconds(job: Job, wires: TrainingCollectives, mixers: float, feeds: float, expert_feeds: float) -> float:
    """Tensor parallelism of one microbatch, forward and backward: a third and more of it is forward.

    With sequence parallelism a gather before and a scatter after each block, and another gather backward; without it an
    all-reduce forward and one backward. Experts have theirs inside the expert.
    """
    layout = job.layout
    if layout.tp == 1:
        return 0.0
    size = 2.0 * job.microbatch_tokens * job.model.hidden
    blocks = mixers + feeds - expert_feeds
    if job.model.shared_intermediate:
        blocks += expert_feeds
    if layout.sequence_parallel:
        gather = wires("all_gather", size, layout.tp, 1)
        scatter = wires("reduce_scatter", size, layout.tp, 1)
        return blocks * (2 * gather + 2 * scatter)
    return blocks * 2 * wires("all_reduce", size, layout.tp, 1)


def context_seconds(job: Job, wires: TrainingCollectives, attention_layers: float) -> float:
    """Context parallelism of one microbatch: keys and values go round the ring, and their gradients with them back."""
    layout, model = job.layout, job.model
    if layout.cp == 1:
        return 0.0
    channels = model.kv_heads * (model.head_dim + model.value_dim) / layout.tp
    if model.kv_rank:
        channels = model.kv_rank + model.rope_dim
    size = 2.0 * job.microbatch_tokens * max(channels, 1.0)
    hop = wires("send_recv", size, 2, layout.tp)
    return attention_layers * 3 * (layout.cp - 1) * hop


def expert_seconds(job: Job, wires: TrainingCollectives, expert_layers: float) -> float:
    """Expert parallelism of one microbatch: tokens go to their experts and come back, forward and backward."""
    layout, model = job.layout, job.model
    if not expert_layers:
        return 0.0
    spread = layout.tp if layout.sequence_parallel else 1
    width = model.latent or model.hidden
    routed = job.microbatch_tokens / spread * model.active_experts * width
    sent = routed * _copies(job, wires.domain)
    there = wires.exchange(sent * min(2.0, max(1.0, job.precision.saved)), layout.ep, layout.etp)
    back = wires.exchange(2.0 * sent, layout.ep, layout.etp)
    inside = 0.0
    if layout.etp > 1:
        size = 2.0 * routed * layout.etp
        inside = wires("all_gather", size, layout.etp, 1) + wires("reduce_scatter", size, layout.etp, 1)
    return expert_layers * 2 * (there + back + inside)


def _copies(job: Job, domain: int) -> float:
    """Share of the routed tokens that crosses the network once a token goes to each domain only once.

    Dispatchers since 2025 send a token once to every node where it has experts, and copy it there; older ones, and
    those inside one domain, send it to every expert.
    """
    layout, model = job.layout, job.model
    domains = max(1, -(-layout.ep * layout.etp // domain))
    if domains == 1 or job.year < DEDUPLICATED_YEAR:
        return 1.0
    plain = model.active_experts * (domains - 1) / domains
    return (domains - 1) * (1 - (1 - 1 / domains) ** model.active_experts) / plain


def pipeline_seconds(job: Job, wires: TrainingCollectives) -> float:
    """Sends of one microbatch between stages, forward and backward, through all pieces of a stage."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    size = 2.0 * job.microbatch_tokens * job.model.hidden / (layout.tp if layout.scatter_pipeline else 1)
    stride = layout.tp * layout.cp * layout.dp
    return 2 * layout.virtual * wires("send_recv", size, 2, min(stride, layout.gpus // 2))


@dataclass(slots=True)
class DataTraffic:
    """Seconds of data-parallel communication: what comes with every microbatch, and what comes once a step."""

    gather_each: float = 0.0
    scatter_each: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0


def data_seconds(job: Job, wires: TrainingCollectives, stage: Stage) -> DataTraffic:
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
        if layout.sharding in ("none", "zero1"):
            count = max(1.0, round(weights / max(BUCKET, BUCKET_PER_RANK * ranks)))
            if job.software == "eager" and layout.sharding == "zero1":
                count = MATRICES_PER_LAYER * max(1.0, stage.layers)
            if layout.sharding == "none":
                result.reduce += wires.pieces(count, "all_reduce", gradients, ranks, stride)
                continue
            inside = math.gcd(ranks, layout.shard_ranks)
            result.reduce += wires.pieces(count, "reduce_scatter", gradients, inside, stride)
            result.gather += wires.pieces(count, "all_gather", parameters * job.trainable, inside, stride)
            if inside < ranks:
                size = gradients / inside
                result.reduce += wires.pieces(count, "all_reduce", size, ranks // inside, stride * inside)
            continue
        count = max(1.0, stage.layers) * (4 if job.software == "unfused" else 1)
        inside = math.gcd(ranks, layout.shard_ranks) if layout.sharding == "hsdp" else ranks
        gather = wires.pieces(count, "all_gather", parameters, inside, stride)
        times = 1 if layout.sharding == "zero2" else 2
        if job.software == "unfused" and layout.recomputes("layer"):
            times += 1  # early ZeRO-3 let go of the weights between recomputing a layer and its backward pass
        result.gather_each += times * gather
        result.scatter_each += wires.pieces(count, "reduce_scatter", gradients, inside, stride)
        if job.software == "unfused":
            result.gather_each += times * count * (FETCH_SECONDS + FETCH_SECONDS_PER_RANK * ranks)
            result.scatter_each += count * (FETCH_SECONDS + FETCH_SECONDS_PER_RANK * ranks)
        if inside < ranks:
            result.reduce += wires.pieces(count, "all_reduce", gradients / inside, ranks // inside, stride * inside)
    return result


def hidden_behind(communication: float, available: float) -> float:
    """Seconds of communication that pass behind `available` seconds: the smaller of the two, less near equality."""
    if communication <= 0 or available <= 0:
        return 0.0
    ratio = min(communication, available) / max(communication, available)
    smaller: float = min(communication, available) / (1 + ratio**3) ** (1 / 3)
    return smaller


__all__ = ["Planner", "TrainingTime", "training_time"]


class Planner:
    """Training times on one cluster; remembers what layouts have in common, so that a search is quick."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency | None = None, times: CollectiveTimes | None = None):
        self.cluster = cluster
        self.efficiency = efficiency or load_efficiency().values
        self.wires = TrainingCollectives(times or CollectiveTimes(cluster), self.efficiency)
        self._layers: dict[object, tuple[ComputeSeconds, ComputeSeconds, ComputeSeconds]] = {}
        self._rates: dict[object, TrainingRates] = {}
        self._flops: dict[object, tuple[float, float]] = {}

    def rates(self, job: Job) -> TrainingRates:
        """What the machine reaches for this job."""
        alone = job.layout.sharding in ("zero3", "hsdp") or job.layout.microbatches == 1
        key = (job.precision.name, job.software, job.year, job.trainable, alone)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = TrainingRates(self.cluster.machine, job, self.efficiency)
        return found

    def layers(self, job: Job) -> tuple[ComputeSeconds, ComputeSeconds, ComputeSeconds]:
        """All layers, all feeds alone, and the output layer, for one microbatch on one rank."""
        layout = job.layout
        key = (
            job.model, job.sequence, job.precision.name, job.software, job.year, job.trainable, layout.tp,
            layout.sequence_parallel, layout.cp, layout.microbatch, layout.ep, layout.etp,
            layout.sharding in ("zero3", "hsdp") or layout.microbatches == 1,
        )  # fmt: skip
        found = self._layers.get(key)
        if found is None:
            rates, model = self.rates(job), job.model
            everything, feeds = ComputeSeconds(), ComputeSeconds()
            for kind in set(model.mixers) - {"-"}:
                everything.add(mixer_seconds(job, kind, rates), model.mixers.count(kind))
            for kind in set(model.feeds) - {"-"}:
                feeds.add(feed_seconds(job, kind, rates), model.feeds.count(kind))
            output = output_seconds(job, rates)
            if model.predictions:
                everything.add(mixer_seconds(job, "A", rates), model.predictions)
                feeds.add(feed_seconds(job, "E" if model.is_moe else "D", rates), model.predictions)
                output.add(output, model.predictions)
            everything.add(feeds, 1)
            found = self._layers[key] = (everything, feeds, output)
        return found

    def seconds(self, job: Job) -> float:
        """Seconds of one step of `job`."""
        return sum(self._parts(job)[0].values())

    def time(self, job: Job) -> TrainingTime:
        """One step of `job`."""
        parts, hidden = self._parts(job)
        model_flops, again = self._work(job)
        return TrainingTime(
            seconds=sum(parts.values()),
            parts=parts,
            hidden=hidden,
            tokens=job.tokens,
            gpus=job.layout.gpus,
            model_flops=model_flops * job.tokens,
            hardware_flops=(model_flops + again) * job.tokens,
            peak=self._peak(job),
        )

    def _parts(self, job: Job) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the parts of a step, and of communication that hides behind them."""
        model, layout, constants = job.model, job.layout, self.efficiency
        if layout.gpus > self.cluster.gpus:
            raise UsageError(
                f"gpus={layout.gpus} is more than the cluster's {self.cluster.gpus}. Nearest: gpus={self.cluster.gpus}."
            )
        layers, feeds, output = self.layers(job)
        stages, pieces = layout.pp, layout.microbatches
        if layout.split:
            per_stage, last = max(layout.split), layout.split[-1]
        else:
            per_stage = math.ceil(model.layers / stages)
            last = model.layers - per_stage * (stages - 1)
        # one layer's share of everything; the slowest stage sets the pace
        share = per_stage / model.layers
        last_share = max(last, 0) / model.layers
        with_output = share * layers.total < last_share * layers.total + output.total
        if with_output:
            share = last_share
        expert_layers = model.feeds.count("E")
        blocks = model.layers - model.mixers.count("-")
        all_feeds = model.layers - model.feeds.count("-")
        wires = self.wires

        compute = ComputeSeconds()
        compute.add(layers, share)
        if with_output or stages == 1:
            compute.add(output, 1)
        forward = compute.forward
        recompute = share * self._recomputed(job, layers, feeds)
        tensor = share * tensor_seconds(job, wires, blocks, all_feeds, expert_layers)
        if layout.recomputes("layer"):
            tensor *= 1.5
        context = share * context_seconds(job, wires, model.attention_layers)
        experts = share * expert_seconds(job, wires, expert_layers)
        pipeline = pipeline_seconds(job, wires)
        tensor_exposed = tensor * (constants.tensor_exposed if layout.overlap_tensor else 1.0)
        context_exposed = context * constants.context_exposed
        experts_exposed = experts * (constants.expert_exposed if layout.overlap_experts else 1.0)
        pipeline_exposed = pipeline * (constants.pipeline_exposed if layout.overlap_pipeline else 1.0)
        busy = compute.total + recompute + tensor_exposed + context_exposed + experts_exposed
        launch = constants.launch_eager if job.software == "eager" else constants.launch_fused
        launches = _soft_max(busy, share * model.layers * launch) - busy
        if expert_layers:
            waiting = constants.expert_sync + constants.expert_each * model.experts / layout.ep
            static = not job.dropless or job.year >= GRAPHED_EXPERTS_YEAR
            launches += share * expert_layers * waiting * (constants.expert_graph if static else 1.0)
        data, data_each, data_hidden = self._data(job, stage(model, layout, 0), busy + launches, forward + recompute)
        piece = busy + launches + pipeline_exposed + data_each
        bubble_pieces = (stages - 1) / layout.virtual
        if layout.schedule == "zero-bubble":
            bubble_pieces /= 3
        average = piece if stages == 1 else piece - (output.total if with_output else 0.0) * (1 - 1 / stages)
        parts = {
            "products": pieces * compute.products,
            "attention": pieces * compute.attention,
            "memory-bound": pieces * compute.memory,
            "casts": pieces * compute.quantize,
            "recompute": pieces * recompute,
            "launches": pieces * launches,
            "tensor": pieces * tensor_exposed,
            "context": pieces * context_exposed,
            "experts": pieces * experts_exposed,
            "pipeline": pieces * pipeline_exposed,
            "bubble": bubble_pieces * average,
            "data": data + pieces * data_each,
            "optimizer": self._optimizer(job, stage(model, layout, 0)),
            "step": constants.step,
        }
        total = sum(parts.values())
        parts["stragglers"] = total * constants.straggle * math.log2(max(1.0, layout.gpus / self.cluster.gpus_per_node))
        hidden = {
            "tensor": pieces * (tensor - tensor_exposed),
            "context": pieces * (context - context_exposed),
            "experts": pieces * (experts - experts_exposed),
            "pipeline": pieces * (pipeline - pipeline_exposed),
            "data": data_hidden,
        }
        return parts, hidden

    def _peak(self, job: Job) -> float:
        theoretical = self.cluster.machine.theoretical
        assert theoretical is not None
        return theoretical.peak(job.precision.products)

    def _work(self, job: Job) -> tuple[float, float]:
        """Model FLOPs of a token, and those that are done again."""
        key = (job.model, job.sequence, job.layout.recompute)
        found = self._flops.get(key)
        if found is None:
            flops = forward_flops(job.model, job.sequence)
            again = flops.total - flops.output if job.layout.recomputes("layer") else 0.0
            found = self._flops[key] = (flops.training, again)
        return found

    def _recomputed(self, job: Job, layers: ComputeSeconds, feeds: ComputeSeconds) -> float:
        """Seconds of one microbatch that all layers together compute again."""
        layout, model = job.layout, job.model
        if not layout.recompute:
            return 0.0
        if layout.recomputes("layer"):
            return layers.forward
        rows, rates = job.microbatch_tokens, self.rates(job)
        seconds = 0.0
        for module in layout.recompute:
            if module == "attention":
                seconds += layers.attention / 3.5
            elif module in ("feed", "experts"):
                seconds += feeds.forward
            elif module == "mla_up":
                seconds += 0.1 * layers.products / 3
            elif module == "feed_activation":
                width = model.intermediate + model.active_experts * model.expert_intermediate
                seconds += model.layers * 6.0 * rows * width / layout.tp * rates.traffic / rates.bandwidth
            elif module == "norm":
                seconds += model.layers * 8.0 * rows * model.hidden / layout.tp * rates.traffic / rates.bandwidth
        return seconds

    def _data(self, job: Job, first: Stage, piece: float, forward: float) -> tuple[float, float, float]:
        """Exposed seconds once a step, exposed seconds of each microbatch, and hidden seconds of the step."""
        layout, constants = job.layout, self.efficiency
        traffic = data_seconds(job, self.wires, first)
        once, each = traffic.gather + traffic.reduce, traffic.gather_each + traffic.scatter_each
        if not once and not each:
            return 0.0, 0.0, 0.0
        if not layout.overlap_gradients:
            return once, each, 0.0
        each_hidden = hidden_behind(each, constants.sharded_hidden * piece)
        gather_hidden = hidden_behind(traffic.gather, constants.data_hidden * forward)
        reduce_hidden = hidden_behind(traffic.reduce, constants.data_hidden * (piece - forward))
        hidden = gather_hidden + reduce_hidden
        return once - hidden, each - each_hidden, hidden + layout.microbatches * each_hidden

    def _optimizer(self, job: Job, first: Stage) -> float:
        """Seconds of the optimizer: states read and written, gradients read twice, weights written."""
        layout, precision, machine = job.layout, job.precision, self.cluster.machine
        expert_ranks = 1 if layout.sharding == "none" else max(1, layout.edp)
        mine = first.dense_weights / layout.shard_ranks + first.expert_weights / expert_ranks
        weights = first.dense_weights + first.expert_weights
        held = mine if layout.sharding in ("zero2", "zero3", "hsdp") else weights
        moved = mine * (2 * precision.optimizer + precision.parameters) + 3 * held * precision.gradients
        assert machine.theoretical is not None
        seconds = job.trainable * moved / (self.efficiency.memory * machine.theoretical.bandwidth)
        if layout.offload != "none" and machine.pcie is not None:
            seconds += job.trainable * 2 * mine * precision.optimizer / (0.8 * machine.pcie.bandwidth)
        return seconds


def training_time(job: Job, cluster: Cluster, efficiency: Efficiency | None = None) -> TrainingTime:
    """One step of `job` on `cluster`."""
    return Planner(cluster, efficiency).time(job)


def _soft_max(first: float, second: float) -> float:
    """The larger of two; a little more where they are near, since they do not overlap in full."""
    return float((first**4 + second**4) ** 0.25)
