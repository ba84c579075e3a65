"""Products run in full float32 on a machine whose matrix engine would take them in a shorter format many times faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from nearpeak.diagnose.examined import Examined
from nearpeak.diagnose.finding import Waste
from nearpeak.diagnose.findings import rule
from nearpeak.diagnose.variants import slowness, with_dtype
from nearpeak.machines.model import Machine
from nearpeak.units import percent, quantity, seconds
from nearpeak.work.cost import Access

_FASTER = 1.5
"""How many times the rate of float32 a format must have, so that casts and other roundings are worth it."""
_MOST = 0.5
"""Of the time of all products: above this the precision of the whole step is the matter, not that of a line."""


@rule("float32-products")
def float32_products(step: Examined) -> Iterator[Waste]:
    """Matrix products, convolutions and attention that compute in float32 where the machine has a faster format."""
    instead = _format(step.machine)
    if instead is None:
        return
    products = [index for index, cost in enumerate(step.costs) if cost.product_flops]
    slow = [index for index in products if set(step.costs[index].product_flops) == {"float32"}]
    gains = {index: _gain(step, index, instead) for index in slow}
    gains = {index: gain for index, gain in gains.items() if gain > 0}
    if not gains:
        return
    if step.seconds(slow) > _MOST * step.seconds(products):
        yield _waste(step, sorted(gains, key=lambda index: -gains[index]), gains, instead)
        return
    for index in gains:
        yield _waste(step, [index], gains, instead)


def _format(machine: Machine) -> str | None:
    """What products could run in: tf32, which needs no casts, or the fastest of 16 bits."""
    limits = machine.achievable
    if limits is None:
        return None
    now = limits.matrix.get("float32", limits.vector.get("float32"))
    for name in ("tfloat32", "bfloat16", "float16"):
        if now and limits.matrix.get(name, 0.0) >= _FASTER * now:
            return name
    return None


def _gain(step: Examined, index: int, instead: str) -> float:
    op, took = step.ops[index], step.measured[index].measured_s
    if instead == "tfloat32":
        arguments = {**op.arguments, "allow_tf32": True} if "allow_tf32" in op.arguments else op.arguments
        better = dataclasses.replace(op, arguments=arguments, tf32_products=True, tf32_convolutions=True)
        casts = 0.0
    else:
        better = with_dtype(op, "float32", instead)
        casts = sum(
            step.of_work(
                [Access(storage=tensor.storage, bytes=tensor.bytes)], [Access(storage=-1, bytes=tensor.bytes / 2)]
            )
            for tensor in op.inputs
            if tensor.dtype == "float32"
        )
    expected = step.expected(better)
    return 0.0 if expected is None else took - expected * slowness(step, index) - casts


def _waste(step: Examined, members: Sequence[int], gains: dict[int, float], instead: str) -> Waste:
    took = step.seconds(members)
    flops = sum(sum(step.costs[index].product_flops.values()) for index in members)
    lines = len({step.ops[index].source for index in members})
    limits = step.machine.achievable
    assert limits is not None  # else there is no format to prefer
    now = limits.matrix.get("float32") or limits.vector["float32"]
    where = f" at {lines} lines" if lines > 1 else ""
    return Waste(
        title=f"Products run in full float32, at {percent(now / limits.matrix[instead], 0)} of the rate of {instead}.",
        at=members[0],
        gains={index: gains[index] for index in members},
        evidence=f"{len(members)} ops{where} compute {quantity(flops, 'FLOP')} in float32 in {seconds(took)}: "
        f"{quantity(flops / took, 'FLOP/s')}. {step.machine.name} reaches {quantity(limits.matrix[instead], 'FLOP/s')} "
        f"in {instead}.",
        reasoning=f"The same ops in {instead}, each at what a good kernel reaches"
        + (", less the casts of their inputs." if instead != "tfloat32" else "; casts are not needed."),
        remedy=_remedy(step, instead),
    )


def _remedy(step: Examined, instead: str) -> str:
    device = "cuda" if step.machine.kind == "gpu" else "cpu"
    if instead != "tfloat32":
        return f'with torch.autocast("{device}", dtype=torch.{instead}):\n    ...  # the forward pass and the loss'
    return (
        'torch.set_float32_matmul_precision("high")  # once, before the first step; sums stay in float32\n'
        "torch.backends.cudnn.allow_tf32 = True  # the same for convolutions\n"
        f'or, faster still: with torch.autocast("{device}", dtype=torch.bfloat16): ...'
    )
