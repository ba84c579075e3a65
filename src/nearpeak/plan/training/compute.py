"""Seconds of computation of one microbatch on one rank: products, attention, memory-bound parts, casts, launches.

A product takes its FLOPs at the rate that large products reach, and its traffic at the memory's: the sum of the two is
near the first for large matrices and near the second for thin ones, which is how utilisation falls with size.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.machines.model import Machine
from nearpeak.plan.models.flops import BACKWARD_ATTENTION, scan_flops, score_flops
from nearpeak.plan.models.model import Model
from nearpeak.plan.models.parameters import attention_matrices, state_space_matrices
from nearpeak.plan.training.efficiency import STATIC_EXPERTS, Efficiency, attention_rate, product_rate
from nearpeak.plan.training.job import Job

UNFUSED_ACTIVATION = 5.0
"""Traffic of an activation that is written as single operators, beyond that of one kernel."""


@dataclass(slots=True)
class Seconds:
    """Seconds of one piece of work, forward and backward together where nothing else is said."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    quantise: float = 0.0
    forward: float = 0.0
    """Share of the sum of the four that is the forward pass, in seconds."""

    @property
    def total(self) -> float:
        """The four kinds together."""
        return self.products + self.attention + self.memory + self.quantise

    def add(self, other: Seconds, times: float) -> None:
        """Adds `times` of another piece."""
        self.products += times * other.products
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.quantise += times * other.quantise
        self.forward += times * other.forward


class Rates:
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
        self.quantise = 0.0 if scaling == "none" else float(getattr(efficiency, f"quantise_{scaling}"))


def product(seconds: Seconds, rates: Rates, rows: float, inputs: float, outputs: float, *, groups: float = 1.0,
            wide: bool = False, slow: float = 1.0) -> None:  # fmt: skip
    """Adds one product of `groups` weights, forward and both backward ones, with its casts."""
    flops = 2.0 * rows * inputs * outputs
    rate = (rates.wide if wide else rates.products) * slow
    size = 2.0 if wide else rates.input_bytes
    weights = groups * inputs * outputs
    traffic = rows * inputs * size + weights * size + 2.0 * rows * outputs
    forward = flops / rate + traffic / rates.bandwidth
    seconds.products += (1.0 + rates.backward) * forward + rates.summed * weights / rates.bandwidth
    seconds.forward += forward
    if rates.quantise and not wide:
        casts = rates.quantise * rows * (2.0 + 2 * size) * inputs / rates.bandwidth
        back = rates.quantise * rows * (2.0 + 2 * size) * outputs / rates.bandwidth
        seconds.quantise += casts + back
        seconds.forward += casts


def moved(seconds: Seconds, rates: Rates, forward_bytes: float, backward_bytes: float) -> None:
    """Adds memory-bound work."""
    unit = rates.traffic / rates.bandwidth
    seconds.memory += unit * (forward_bytes + backward_bytes)
    seconds.forward += unit * forward_bytes


def mixer_seconds(job: Job, kind: str, rates: Rates) -> Seconds:
    """One mixer for one microbatch on one rank."""
    model, layout = job.model, job.layout
    rows, tp = float(job.microbatch_tokens), layout.tp
    spread = tp if layout.sequence_parallel else 1
    seconds = Seconds()
    hidden = model.hidden
    # residual and norm: read and written once each forward; three reads and two writes of gradients and inputs back
    moved(seconds, rates, 8.0 * rows * hidden / spread, 12.0 * rows * hidden / spread)
    if kind == "M":
        for name, inputs, outputs in state_space_matrices(model):
            split = (inputs, outputs / tp) if name == "in" else (inputs / tp, outputs)
            product(seconds, rates, rows, *split)
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
            product(seconds, rates, rows / spread, inputs, outputs)
        elif name == "output":
            product(seconds, rates, rows, inputs / tp, outputs)
        else:
            product(seconds, rates, rows, inputs, outputs / tp)
    rotated = model.heads * model.head_dim + model.kv_heads * model.head_dim
    if model.positions:
        rotated = 0
    moved(seconds, rates, 4.0 * rows * rotated / tp, 4.0 * rows * rotated / tp)
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


def feed_seconds(job: Job, kind: str, rates: Rates) -> Seconds:
    """One feed for one microbatch on one rank."""
    model, layout = job.model, job.layout
    rows, tp = float(job.microbatch_tokens), layout.tp
    spread = tp if layout.sequence_parallel else 1
    seconds = Seconds()
    moved(seconds, rates, 8.0 * rows * model.hidden / spread, 12.0 * rows * model.hidden / spread)
    if kind == "D":
        _feed(seconds, rates, model, rows, model.hidden, model.intermediate / tp)
        return seconds
    efficiency = rates.efficiency
    width = model.latent or model.hidden
    routed = rows / spread * model.active_experts
    local = model.experts / layout.ep
    experts = Seconds()
    _feed(experts, rates, model, routed * layout.etp, width, model.expert_intermediate / layout.etp, groups=local,
          slow=efficiency.expert_products)  # fmt: skip
    late = job.year >= STATIC_EXPERTS
    tokens = efficiency.expert_traffic * 4.0 * routed * width / rates.bandwidth
    experts.memory += 4 * tokens  # permuted and combined, forward and backward
    experts.forward += 2 * tokens
    if late and model.gated:  # one kernel for the activation, the casts and the order of tokens
        saved = (1 - efficiency.expert_fused) * (experts.memory + experts.quantise)
        experts.memory *= efficiency.expert_fused
        experts.quantise *= efficiency.expert_fused
        experts.forward -= saved / 2
    if model.expert_bias:  # the bias and the clamped activation that goes with it are operators of their own
        inner = routed * model.expert_intermediate
        moved(experts, rates, UNFUSED_ACTIVATION * 6.0 * inner, UNFUSED_ACTIVATION * 10.0 * inner)
    seconds.add(experts, 1.0)
    product(seconds, rates, rows / spread, model.hidden, model.experts, wide=True)
    if model.shared_intermediate:
        _feed(seconds, rates, model, rows, model.hidden, model.shared_intermediate / tp)
    if model.latent:
        product(seconds, rates, rows / spread, model.hidden, width)
        product(seconds, rates, rows / spread, width, model.hidden)
    return seconds


def _feed(seconds: Seconds, rates: Rates, model: Model, rows: float, hidden: float, inner: float, *,
          groups: float = 1.0, slow: float = 1.0) -> None:  # fmt: skip
    ups = 2 if model.gated else 1
    product(seconds, rates, rows, hidden, ups * inner, groups=groups, slow=slow)
    product(seconds, rates, rows, inner, hidden, groups=groups, slow=slow)
    moved(seconds, rates, 2.0 * (ups + 1) * rows * inner, 2.0 * (2 * ups + 1) * rows * inner)


def output_seconds(job: Job, rates: Rates) -> Seconds:
    """The output layer and the loss for one microbatch on one rank."""
    model, tp = job.model, job.layout.tp
    rows = float(job.microbatch_tokens)
    if model.image_tokens:
        rows /= model.image_tokens
    seconds = Seconds()
    product(seconds, rates, rows, model.hidden, model.vocabulary / tp, wide=True)
    logits = rows * model.vocabulary / tp
    moved(seconds, rates, 10.0 * logits, 6.0 * logits)  # to float32, the maximum, the sum; gradients in place
    return seconds
