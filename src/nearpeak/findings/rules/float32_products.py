"""GEMMs run in float32 on the vector units, although the GPU has a matrix engine for tf32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

PRODUCTS = ("matrix", "convolution", "attention", "recurrent")


@rule("float32-products")
def float32_products(step: Step) -> Iterator[Waste]:
    """Float32 GEMMs, convolutions and attention without tf32; one waste for all, since one setting changes them all."""
    limits = step.machine.achievable
    if step.machine.kind != "gpu" or limits is None or "tfloat32" not in limits.matrix:
        return
    gains: dict[int, float] = {}
    flops = after = 0.0
    for index, (op, cost) in enumerate(zip(step.ops, step.costs, strict=True)):
        if cost.family not in PRODUCTS or not cost.product_flops.get("float32"):
            continue
        better = step.expected(_in_tf32(op))
        took = step.time(index)
        if better is not None and better < took:
            gains[index] = took - better
            flops += cost.product_flops["float32"]
            after += better
    if not gains:
        return
    largest = max(gains, key=lambda index: (bool(step.ops[index].source), gains[index]))
    took = step.seconds(gains)
    yield Waste(
        title="Products run in float32 on the vector units, and the matrix engine is idle.",
        op=largest,
        gains=gains,
        evidence=f"{len(gains)} float32 products, the largest {step.ops[largest].packet} of "
        f"{_sizes(step.ops[largest])}: {quantity(flops, 'FLOP')} in {seconds(took)} = "
        f"{quantity(flops / took, 'FLOP/s')}; in tf32 this machine reaches "
        f"{quantity(limits.matrix['tfloat32'], 'FLOP/s')}.",
        reasoning=f"Good tf32 kernels take {seconds(after)} for the same products, which read and write as much as "
        "before.",
        remedy=_remedy(step, gains),
    )


def _in_tf32(op: Op) -> Op:
    return dataclasses.replace(op, tf32_products=True, tf32_convolutions=True)


def _sizes(op: Op) -> str:
    return " and ".join("x".join(map(str, tensor.shape)) for tensor in op.inputs if len(tensor.shape) > 1)


def _remedy(step: Step, indices: dict[int, float]) -> str:
    families = {step.costs[index].family for index in indices}
    lines = []
    if families - {"convolution", "recurrent"}:
        lines.append('torch.set_float32_matmul_precision("high")  # once, at the start of the program')
    if families & {"convolution", "recurrent"}:
        lines.append("torch.backends.cudnn.allow_tf32 = True  # once, at the start of the program")
    lines.append("# Factors are rounded to 10 bits of mantissa, sums stay in float32. Faster still, with 7 bits:")
    lines.append('with torch.autocast("cuda", dtype=torch.bfloat16): ...')
    return "\n".join(lines)
