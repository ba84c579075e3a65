"""Seconds of communication of one rank: per microbatch (tensor, context, expert, pipeline), and per step (data).

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline; the experts' mesh has its own
order over the same GPUs: tensor inside an expert, experts, data, pipeline. Neighbours in a group lie as far apart as
the product of the inner degrees, which decides what stays inside a node or a rack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearpeak.plan.network.collectives import CollectiveTimes
from nearpeak.plan.training.efficiency import Efficiency
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.stages import Stage


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
DEDUPLICATED = 2025.6
"""From when on tokens cross the network once for each node (DeepEP, HybridEP in Megatron)."""
FETCH, FETCH_RANK = 3e-3, 5e-6
"""Seconds beyond the collective, and for each rank, that ZeRO-3 of 2021 took to fetch or reduce one matrix: hooks in
Python, no prefetching, and a tensor of its own for the piece of every rank. Assumed; later software gathers a layer at
once."""
TENSORS = 7
"""Matrices of one layer: as many collectives, where software has no buckets."""


class Wires:
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


def tensor_seconds(job: Job, wires: Wires, mixers: float, feeds: float, expert_feeds: float) -> float:
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


def context_seconds(job: Job, wires: Wires, attention_layers: float) -> float:
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


def expert_seconds(job: Job, wires: Wires, expert_layers: float) -> float:
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
    if domains == 1 or job.year < DEDUPLICATED:
        return 1.0
    plain = model.active_experts * (domains - 1) / domains
    return (domains - 1) * (1 - (1 - 1 / domains) ** model.active_experts) / plain


def pipeline_seconds(job: Job, wires: Wires) -> float:
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


def data_seconds(job: Job, wires: Wires, stage: Stage) -> DataTraffic:
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
                count = TENSORS * max(1.0, stage.layers)
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
            result.gather_each += times * count * (FETCH + FETCH_RANK * ranks)
            result.scatter_each += count * (FETCH + FETCH_RANK * ranks)
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
