"""`training_time`: seconds of one training step, as parts that sum to it, and what hides behind them.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> from nearpeak.plan.training.job import Job, precision_named
>>> from nearpeak.plan.training.layout import Layout
>>> layout = Layout(gpus=64, tp=4, pp=4, virtual=5, global_batch=128, overlap_tensor=True)
>>> job = Job(model=model("llama-3-70b"), layout=layout, sequence=8192, precision=precision_named("bf16-master"))
>>> found = training_time(job, Cluster.of("h100-sxm x 64"))
>>> abs(sum(found.parts.values()) - found.seconds) < 1e-9 * found.seconds
True
"""

from __future__ import annotations

import math

from nearpeak.errors import UsageError
from nearpeak.plan.models.flops import forward_flops
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.network.collectives import CollectiveTimes
from nearpeak.plan.training.communication import (
    Wires,
    context_seconds,
    data_seconds,
    expert_seconds,
    hidden_behind,
    pipeline_seconds,
    tensor_seconds,
)
from nearpeak.plan.training.compute import Rates, Seconds, feed_seconds, mixer_seconds, output_seconds
from nearpeak.plan.training.efficiency import STATIC_EXPERTS, Efficiency, load_efficiency
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.stages import Stage, stage
from nearpeak.plan.training.step_time import TrainingTime

__all__ = ["Planner", "TrainingTime", "training_time"]


class Planner:
    """Training times on one cluster; remembers what layouts have in common, so that a search is quick."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency | None = None, times: CollectiveTimes | None = None):
        self.cluster = cluster
        self.efficiency = efficiency or load_efficiency().values
        self.wires = Wires(times or CollectiveTimes(cluster), self.efficiency)
        self._layers: dict[object, tuple[Seconds, Seconds, Seconds]] = {}
        self._rates: dict[object, Rates] = {}
        self._flops: dict[object, tuple[float, float]] = {}

    def rates(self, job: Job) -> Rates:
        """What the machine reaches for this job."""
        alone = job.layout.sharding in ("zero3", "hsdp") or job.layout.microbatches == 1
        key = (job.precision.name, job.software, job.year, job.trainable, alone)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = Rates(self.cluster.machine, job, self.efficiency)
        return found

    def layers(self, job: Job) -> tuple[Seconds, Seconds, Seconds]:
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
            everything, feeds = Seconds(), Seconds()
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

        compute = Seconds()
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
            static = not job.dropless or job.year >= STATIC_EXPERTS
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
            "casts": pieces * compute.quantise,
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

    def _recomputed(self, job: Job, layers: Seconds, feeds: Seconds) -> float:
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
