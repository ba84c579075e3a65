"""Profiles of any size, made up: layers of a transformer with a timeline, gaps, findings, memory and rates."""

import dataclasses
import random

from made_up import profile as tiny  # type: ignore[import-not-found]

from nearpeak.profiles.excerpt import SourceExcerpt
from nearpeak.profiles.finding import Finding, Fix
from nearpeak.profiles.idle import Gap, IdleCause
from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.profile import DeviceKernel, Profile, ProfileCeilings, ProfiledOp
from nearpeak.profiles.rates import StepRates
from nearpeak.profiles.waterfall import build_waterfall

KINDS = (  # name, family, FLOP per byte, limiter, share of ops in each block of 10
    ("aten.mm.default", "matrix", 400.0, "compute"),
    ("aten.mul.Tensor", "pointwise", 0.25, "memory"),
    ("aten.add.Tensor", "pointwise", 0.2, "cache"),
    ("aten._to_copy.default", "movement", 0.0, "memory"),
    ("aten.view.default", "view", 0.0, "none"),
    ("aten._scaled_dot_product_flash_attention.default", "attention", 150.0, "compute"),
    ("aten.native_layer_norm.default", "normalization", 2.0, "memory"),
    ("aten.rsqrt.default", "pointwise", 0.1, "launch"),
    ("mine.kernel.default", "custom", 1.0, "none"),
    ("aten.gelu.default", "pointwise", 1.5, "memory"),
)
PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.act", "input_layernorm")


def profile(ops: int = 400, *, name: str = "{}", seed: int = 0) -> Profile:
    """A step of so many ops. Texts of the profile are put into `name`."""
    made = [_op(number, ops, name, random.Random(seed * 1_000_003 + number)) for number in range(ops)]
    timeline, gaps = _timeline(made, name)
    kernel_s = sum(op.measured_s for op in made)
    bound_s = sum(op.bound_s for op in made)
    known_s = sum(op.measured_s for op in made if op.modeled)
    wall_s = 1.05 * kernel_s or 1.0
    idle_s = wall_s - kernel_s
    return dataclasses.replace(
        tiny(),
        source=name.format("train.py"),
        device=name.format("NVIDIA H200"),
        machine="h200-sxm" if name == "{}" else name.format("h200-sxm"),
        wall_s=wall_s,
        kernel_s=kernel_s,
        communication_s=0.0,
        as_written_s=bound_s,
        fused_s=0.8 * bound_s,
        ideal_s=0.5 * bound_s,
        waterfall=build_waterfall(
            wall_s=wall_s,
            ideal_s=0.5 * bound_s,
            fused_s=0.8 * bound_s,
            as_written_s=bound_s,
            modeled_s=known_s,
            kernel_s=kernel_s,
        ),
        modeled_share=known_s / kernel_s if kernel_s else 1.0,
        ops=tuple(made),
        notes=(name.format("A note."),),
        idle=(
            IdleCause(cause="python", seconds=0.6 * idle_s, count=3, where=name.format("train.py:9"), what=""),
            IdleCause(cause="launching", seconds=0.4 * idle_s, count=0, where="", what=name.format("between ops")),
        ),
        steps=7,
        spread=0.01,
        matched=1.0,
        profiled_s=1.2 * wall_s,
        rates=StepRates(
            model_flops=1e13,
            hardware_flops=1.1e13,
            mfu=0.3,
            hfu=0.33,
            recompute_known=True,
            memory_bytes=1e11,
            flops_per_s=3e14,
            bytes_per_s=1.41e12,
            compute_share=0.33,
            bandwidth_share=0.3,
            kernel_flops_per_s=None,
            kernel_bytes_per_s=None,
            kernel_compute_share=None,
            kernel_bandwidth_share=None,
        ),
        memory=PeakMemory(
            device="cuda:0",
            capacity_bytes=150e9,
            peak_bytes=22e9,
            parameters_bytes=2e9,
            gradients_bytes=1e9,
            optimizer_bytes=4e9,
            activations_bytes=15e9,
            phase="backward",
            module=name.format("model"),
        ),
        findings=_findings(ops, wall_s, name),
        undecided=(name.format("a-rule"),),
        timeline=timeline,
        gaps=gaps,
        ceilings=ProfileCeilings(bandwidth=4.7e12),
        excerpts=(
            SourceExcerpt(
                source=name.format("modeling.py:113"),
                first_line=112,
                lines=(name.format("    def forward(self, x):"), name.format("        x = x.float()"), ""),
            ),
        ),
    )


def _op(number: int, ops: int, name: str, draw: random.Random) -> ProfiledOp:
    operator, family, intensity, limiter = KINDS[number % len(KINDS)]
    layer, part = number // 40, PARTS[number // 8 % len(PARTS)]
    phase = "forward" if 3 * number < ops else "backward" if 10 * number < 9 * ops else "optimizer"
    width = 1024 * (1 + number // 10 % 5)
    moved = 0.0 if family == "view" else 4096.0 * width
    flops = intensity * moved
    bound_s = 0.0 if family in ("view", "custom") else max(moved / 4.7e12, flops / 9e14, 7e-7)
    measured_s = 0.0 if family == "view" else (bound_s or 3e-6) * draw.uniform(1.05, 4.0)
    return ProfiledOp(
        name=name.format(operator),
        family=name.format(family),
        phase=phase,
        module=name.format(f"Model.layers.{layer}.{part}") if number % 97 else "",
        source=name.format(f"modeling.py:{100 + number // 8 % 5 * 10 + number % 10}"),
        shapes=((2048, width), (width,)),
        kernels=0 if family == "view" else 1,
        measured_s=measured_s,
        bound_s=bound_s,
        expected_s=1.4 * bound_s if bound_s else None,
        limiter=limiter,
        flops=flops,
        bytes=moved,
        modeled=family != "custom",
        fused_s=0.8 * bound_s,
    )


def _timeline(ops, name):
    at, spans, gaps = 0.0, [], []
    for number, op in enumerate(ops):
        if not op.kernels:
            continue
        if number % 50 == 25:
            length = 2e-5 if number % 100 == 25 else 2e-6
            gaps.append(Gap(start_s=at, seconds=length, cause="python", where=name.format("train.py:9")))
            at += length
        stream = 7 if number % 33 else 20
        spans.append(
            DeviceKernel(
                name=name.format(f"kernel_{number % 30}"),
                start_s=at,
                seconds=op.measured_s,
                op=number,
                stream=stream,
                collective="all_reduce" if number % 211 == 7 else None,
            )
        )
        at += op.measured_s if stream == 7 else 0.3 * op.measured_s
    return tuple(spans), tuple(gaps)


def _findings(ops: int, wall_s: float, name: str) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            rule=name.format(rule),
            title=name.format("A norm is written as 5 ops, a kernel each."),
            source=name.format("modeling.py:113"),
            modules=(name.format("Model.layers.0.mlp"), name.format("Model.layers.1.mlp")),
            places=12,
            saving_s=share * wall_s,
            share=share,
            evidence=name.format("5 ops move 1.2 GB; 0.4 GB would do."),
            reasoning=name.format("One kernel at the speed of a copy."),
            remedy=name.format("x = norm(x)\n    # indented"),
            fix=Fix(id="norm", usage=name.format("nearpeak.kernels.norm")),
            ops=tuple(range(start, ops, 10)),
        )
        for rule, share, start in (("unfused-norm", 0.2, 6), ("repeated-cast", 0.05, 3))
        if start < ops
    )
