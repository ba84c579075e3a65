"""`calibrate_plan`: a measured step of a few layers on one GPU sets the pace of a plan for the whole model.

A profile has the time of every op with the path of its module. Ops under the numbered modules of one list
("model.layers.0", "model.layers.1") are layers, ops of the optimizer and of gradients as a whole go with the number of
weights, and the rest is what a model has once: embedding, output layer, loss. Each of the three is compared with the
plan of the same few layers on one GPU, and the ratios scale the plan of the whole model. Communication, bubbles and
stragglers, which one GPU does not show, stay as planned.

The microbatch of the profile follows from the FLOPs of its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nearpeak.bound.estimate import EstimatedOp
from nearpeak.errors import UsageError
from nearpeak.machines import catalogue
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.model import Model, forward_flops
from nearpeak.plan.training.efficiency import Efficiency, load_efficiency
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.time import LAUNCH_SHARPNESS, Planner
from nearpeak.profiles.profile import Profile, ProfiledOp

LAYER_SHARE = 0.3
"""Least share of a step's FLOPs that must lie in numbered layers, so that a layer is known."""
FLOP_TOLERANCE = 0.12
"""How far the FLOPs of profiled layers may be from those of a whole number of sequences."""
BACKWARD_FLOPS = 3.0
"""Forward and backward FLOPs of a layer over its forward ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A profiled training step on one GPU, split by what it grows with; seconds."""

    layers: int
    layer_kernels: float
    """Kernels of one layer, forward and backward."""
    layer: float
    """One layer with the idle time that its launches cause."""
    once: float
    """Embedding, output layer and loss."""
    weights: float
    """What goes with the number of weights: the optimizer, clipping and zeroing gradients."""
    fixed: float
    """Idle time that belongs to no op."""
    layer_flops: float
    """FLOPs of one layer, forward and backward."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.layers * self.layer + self.once + self.weights + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A measured step beside the plan of the same step, and the constants that make them agree."""

    source: str
    """What was profiled."""
    device: str
    measured: MeasuredStep
    microbatch: int
    """Sequences of the profiled step."""
    planned: float
    """Seconds of the same step as planned before."""
    efficiency: Efficiency

    @property
    def text(self) -> str:
        """One sentence for a report."""
        scales = self.efficiency
        return (
            f"{self.measured.layers} layers of {self.source}, microbatch {self.microbatch}: a layer takes "
            f"{scales.layer_scale:.2f} times as long as planned, the output layer {scales.output_scale:.2f}, the "
            f"optimizer {scales.optimizer_scale:.2f}"
        )


def calibrate_plan(profile: Profile, job: Job, cluster: Cluster) -> Calibration:
    """The constants with which the plan of the profiled layers is the profile.

    `job` is the one to plan: its model, sequence, precision and software are those of the profile. UsageError where
    the profile is of another GPU, has no numbered layers, or its FLOPs are not those of the model.
    """
    machine = cluster.machine
    profiled = catalogue.by_driver_name(profile.device)
    if profiled is None or profiled.id != machine.id:
        raise UsageError(
            f"The profile is of {profile.device or 'an unknown device'}, and the plan is for {machine.name}. Profile "
            f"the step on the GPU to plan for."
        )
    if profile.world_size not in (None, 1) or profile.communication_s > 0:
        raise UsageError("The profile has communication between GPUs. Profile the step on one GPU.")
    step = split_step(profile)
    model = first_layers(job.model, step.layers)
    microbatch = _microbatch(step, model, job)
    layout = Layout(
        gpus=1,
        global_batch=microbatch,
        microbatch=microbatch,
        sharding="none",
        recompute=job.layout.recompute,
        recompute_share=job.layout.recompute_share,
    )
    one = replace(job, model=model, layout=layout)
    planner = Planner(Cluster.of(machine, gpus=1))
    stage = planner.stages(one)[0][0]
    layers, output = planner.compute_seconds(one)
    # the host time of a layer that, beside its kernels, makes the time that was measured
    power = LAUNCH_SHARPNESS
    launch = max(0.0, step.layer**power - step.layer_kernels**power) ** (1 / power)
    efficiency = replace(
        load_efficiency().values,
        layer_scale=step.layer_kernels * step.layers / layers,
        output_scale=step.once / output,
        optimizer_scale=step.weights / stage.optimizer,
        launch_fused=launch,
        launch_eager=launch,
        step=step.fixed,
    )
    return Calibration(
        source=profile.source,
        device=profile.device,
        measured=step,
        microbatch=microbatch,
        planned=planner.time(one).seconds,
        efficiency=efficiency,
    )


def split_step(profile: Profile) -> MeasuredStep:
    """The time of a profiled training step, by what it grows with."""
    ops = profile.ops
    backward = [place for place, op in enumerate(ops) if op.phase == "backward"]
    if not backward or not any(op.phase == "optimizer" for op in ops):
        raise UsageError(
            f"The profile of {profile.source} is not a training step with a backward pass and an optimizer step."
        )
    prefix = layer_list(ops)
    numbers: set[str] = set()
    layer_kernels = layer_waits = once = weights = layer_flops = 0.0
    for place, op in enumerate(ops):
        number = layer_number(op.module, prefix)
        seconds = op.measured_s + op.launch_wait_s
        if number is not None:
            numbers.add(number)
            layer_kernels += op.measured_s
            layer_waits += op.launch_wait_s
            layer_flops += op.flops
        elif op.phase == "optimizer" or place > backward[-1] or (not op.module and "zero_" in op.name):
            weights += seconds
        else:
            once += seconds
    layers = len(numbers)
    fixed = max(0.0, profile.wall_s - layer_kernels - layer_waits - once - weights)
    return MeasuredStep(
        layers=layers,
        layer_kernels=layer_kernels / layers,
        layer=(layer_kernels + layer_waits) / layers,
        once=once,
        weights=weights,
        fixed=fixed,
        layer_flops=layer_flops / layers,
    )


def first_layers(model: Model, layers: int) -> Model:
    """The model with its first `layers` layers."""
    if layers > model.layers:
        raise UsageError(f"The profile has {layers} layers, and {model.name} has {model.layers}. Name the same model.")
    return replace(model, mixers=model.mixers[:layers], feeds=model.feeds[:layers])


def layer_list(ops: Sequence[ProfiledOp | EstimatedOp]) -> str:
    """The path before the numbers of layers: that of the outermost numbered modules with the most FLOPs."""
    flops: dict[str, float] = {}
    for op in ops:
        match = re.match(r"(.*?)(?:^|\.)\d+(?:\.|$)", op.module)
        if match:
            flops[match.group(1)] = flops.get(match.group(1), 0.0) + op.flops
    prefix = max(flops, key=lambda name: flops[name], default=None)
    total = sum(op.flops for op in ops)
    if prefix is None or flops[prefix] < LAYER_SHARE * total:
        raise UsageError(
            "The ops of the step do not name numbered layers, such as model.layers.0: torch.compile removes them. "
            "Profile the step without it."
        )
    return prefix


def layer_number(module: str, prefix: str) -> str | None:
    """The number of the layer that a module is in; None outside of the layers."""
    match = re.match(rf"{re.escape(prefix)}(?:^|\.)(\d+)(?:\.|$)" if prefix else r"(\d+)(?:\.|$)", module)
    return match.group(1) if match else None


def _microbatch(step: MeasuredStep, model: Model, job: Job) -> int:
    """Sequences of the profiled step, from the FLOPs of its layers."""
    forward = forward_flops(model, job.sequence)
    again = job.layout.recompute_share if job.layout.recomputes("layer") else 0.0
    of_sequence = (BACKWARD_FLOPS + again) * (forward.total - forward.output) / step.layers * job.sequence
    sequences = step.layer_flops / of_sequence
    whole = max(1, round(sequences))
    if abs(sequences / whole - 1) > FLOP_TOLERANCE:
        raise UsageError(
            f"A layer of the profile has {step.layer_flops / 1e12:.3g} TFLOP, {sequences:.2f} times that of a sequence "
            f"of {job.sequence} tokens in a layer of {model.name}. Give the --sequence, the --recompute and the model "
            f"that were profiled."
        )
    return whole
