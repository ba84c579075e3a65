"""GEMMs run in float32 on the vector units, although the GPU has a matrix engine for tf32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import with_dtype
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

PRODUCTS = ("matrix", "convolution", "attention", "recurrent")


_SHORT = ("bfloat16", "float16")
_LEAST_SHORT = 0.1
"""Of the FLOPs of all products: with as many in 16 bits, the rest was forgotten."""


@rule("float32-products")
def float32_products(step: Step) -> Iterator[Waste]:
    """Float32 GEMMs, convolutions and attention without tf32; one waste for all, since one setting changes them all.

    In a step whose other products run in 16 bits, those of a call without autocast, in tf32 or not, are a waste each.
    """
    limits = step.machine.achievable
    if step.machine.kind != "gpu" or limits is None or "tfloat32" not in limits.matrix:
        return
    short = _short_dtype(step)
    long = ("float32",) if short is None else ("float32", "tfloat32")
    lines = _first_own_lines(step) if short is not None else {}
    better: dict[str, dict[int, float]] = {}
    for index, (op, cost) in enumerate(zip(step.ops, step.costs, strict=True)):
        if cost.family not in PRODUCTS or not any(cost.product_flops.get(dtype) for dtype in long):
            continue
        then = step.expected(_in_tf32(op)) if short is None else _in_short(step, op, short)
        if then is not None and then < step.time(index):
            better.setdefault(lines.get(index, ""), {})[index] = then
    for line, times in better.items():
        gains = {index: step.time(index) - then for index, then in times.items()}
        largest = max(gains, key=lambda index: (bool(step.ops[index].source), gains[index]))
        took, after = step.seconds(gains), sum(times.values())
        flops = sum(step.costs[index].product_flops.get(dtype, 0.0) for index in gains for dtype in long)
        engine = short or "tf32"
        yield Waste(
            title="Products run in float32 on the vector units, and the matrix engine is idle."
            if short is None
            else f"Products of this call run in float32, and those of the rest in {short}.",
            op=largest,
            source=line,
            gains=gains,
            evidence=f"{len(gains)} float32 products, the largest {step.ops[largest].packet} of "
            f"{_sizes(step.ops[largest])}: {quantity(flops, 'FLOP')} in {seconds(took)} = "
            f"{quantity(flops / took, 'FLOP/s')}; in {engine} this machine reaches "
            f"{quantity(limits.matrix[short or 'tfloat32'], 'FLOP/s')}.",
            reasoning=f"Good {engine} kernels take {seconds(after)} for the same products, "
            + ("which read and write as much as before." if short is None else "casts of their inputs included."),
            remedy=_remedy(step, gains)
            if short is None
            else f'with torch.autocast("cuda", dtype=torch.{short}): ...  # around this call, as around the others',
        )


def _short_dtype(step: Step) -> str | None:
    """The 16-bit dtype that a good part of the products has, by FLOPs; None if none has."""
    flops: dict[str, float] = {}
    for cost in step.costs:
        for dtype, count in cost.product_flops.items() if cost.family in PRODUCTS else ():
            flops[dtype] = flops.get(dtype, 0.0) + count
    most = max(_SHORT, key=lambda dtype: flops.get(dtype, 0.0))
    limits = step.machine.achievable
    known = limits is not None and most in limits.matrix
    return most if known and flops.get(most, 0.0) >= _LEAST_SHORT * sum(flops.values()) else None


def _first_own_lines(step: Step) -> dict[int, str]:
    """For each product, the outermost line on its stack that no product in 16 bits has behind the same callers."""
    if not step.trace.stacks:
        return {}
    of_short = {
        step.trace.stacks[index][:depth]
        for index, cost in enumerate(step.costs)
        if cost.family in PRODUCTS and any(cost.product_flops.get(dtype) for dtype in _SHORT)
        for depth in range(1, len(step.trace.stacks[index]) + 1)
    }
    lines = {}
    for index, stack in enumerate(step.trace.stacks):
        own = (line for depth, line in enumerate(stack, 1) if stack[:depth] not in of_short)
        lines[index] = next(own, stack[-1] if stack else "")
    return lines


def _in_short(step: Step, op: Op, short: str) -> float | None:
    """The time of a product in 16 bits, with the casts of activations that autocast adds."""
    product = step.expected(with_dtype(op, "float32", short))
    if product is None or op.phase != "forward":
        return product
    casts = 0.0
    for tensor in op.inputs:
        storage = step.trace.storages.get(tensor.storage)
        if len(tensor.shape) > 1 and storage is not None and storage.kind != "parameter":
            read, written = (Access(storage=-number, bytes=tensor.bytes / number) for number in (1, 2))
            casts += step.expected_for_work([read], [written])
    return product + casts


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
