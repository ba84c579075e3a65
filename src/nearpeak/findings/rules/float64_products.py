"""A network computes in float64: its weights and all that is computed with them take twice the bytes of float32."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import with_dtype
from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.units import percent, seconds

_PRODUCTS = ("matrix", "convolution")


@rule("float64-products", needs=["storages"])
def float64_products(step: Step) -> Iterator[Waste]:
    """All ops in float64 of a step that multiplies with weights in float64, compared with the same ops in float32."""
    products = [index for index in range(len(step.ops)) if _multiplies_weight(step, index)]
    if not products or any(cost.family == "linalg" for cost in step.costs):
        return  # factorizations of a matrix lose digits by its condition number, which is why the step is in float64
    gains: dict[int, float] = {}
    for index, op in enumerate(step.ops):
        if step.time(index) and _is_double(op):
            share = _share_in_float32(step, index)
            if share < 1.0:
                gains[index] = step.time(index) * (1.0 - share)
    if not gains:
        return
    took, saved = step.seconds(gains), sum(gains.values())
    longest = max(products, key=step.time)
    yield Waste(
        title="A network computes in float64.",
        op=longest,
        source=step.calling_line(longest),
        gains=gains,
        evidence=f"{len(products)} products with weights are in float64, and {len(gains)} ops in all: {seconds(took)}.",
        reasoning=f"In float32 they move half of the bytes, at a higher rate of arithmetic: {percent(saved / took, 0)} "
        "less time, as good kernels take it. Few networks need more digits; where this one does, there is no waste.",
        remedy="model.float()  # and its inputs: torch.from_numpy(array).float(), since NumPy's arrays are float64\n"
        "# without torch.set_default_dtype(torch.float64)",
    )


def _share_in_float32(step: Step, index: int) -> float:
    """What is left of the time of an op: products are as near to their bound as in float64."""
    op = step.ops[index]
    single = with_dtype(op, "float64", "float32")
    if step.costs[index].family in _PRODUCTS:
        costs = step.costs[index], cost_of(single)
        now, then = (step.least(cost.reads, cost.writes, cost.flops, cost.vector_flops) for cost in costs)
    else:
        now, then = step.expected(op) or 0.0, step.expected(single) or 0.0
    return then / now if now and then else 1.0


def _multiplies_weight(step: Step, index: int) -> bool:
    """Whether an op of forward multiplies with a parameter in float64."""
    op = step.ops[index]
    return (
        op.phase == "forward"
        and step.costs[index].family in _PRODUCTS
        and any(
            tensor.dtype == "float64"
            and len(tensor.shape) > 1
            and tensor.storage in step.trace.storages
            and step.trace.storages[tensor.storage].kind == "parameter"
            for tensor in op.inputs
        )
    )


def _is_double(op: Op) -> bool:
    """Whether an op computes in float64: nearly all bytes of its numbers are in it, and it casts none to it."""
    floating = [tensor for tensor in (*op.inputs, *op.outputs) if tensor.is_floating]
    double = sum(tensor.bytes for tensor in floating if tensor.dtype == "float64")
    return double > 0.9 * sum(tensor.bytes for tensor in floating) and op.packet != "aten._to_copy"
