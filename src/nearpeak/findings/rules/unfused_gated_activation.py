"""A gated activation as two ops, `silu(a) * b`: the activation is written and read again."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import (
    describe_ops,
    launches_removed,
    measured_over_expected,
    ops_that_launch,
    proportional_gains,
    remaining_seconds,
    total_bytes,
    traffic,
    with_backward,
)
from nearpeak.findings.step import Step
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.finding import Fix
from nearpeak.units import quantity, seconds

ACTIVATIONS = (
    *("aten.silu", "aten.gelu", "aten.sigmoid", "aten.relu", "aten.tanh", "aten.hardswish", "aten.mish"),
    *("aten.elu", "aten.softplus", "aten.leaky_relu", "aten.hardsigmoid"),
)


@rule("unfused-gated-activation", needs=["storages"])
def unfused_gated_activation(step: Step) -> Iterator[Waste]:
    """Activations of which forward reads the result once, in a product with another tensor of the same size."""
    products = {
        frozenset((index, product)): index
        for index in range(len(step.ops))
        if (product := _product(step, index)) is not None
    }
    for region in with_backward(step, list(products)):
        activation = products[region.forward]
        members = ops_that_launch(step, region.members)
        took = step.seconds(members)
        remaining = remaining_seconds(step, region, times=measured_over_expected(step, members))
        reads, writes = traffic(step, region)
        passes = "One kernel in forward and one in backward" if region.backward else "One kernel"
        yield Waste(
            title="A gated activation is two ops: the activation is written, and read again for the product.",
            at=max(region.forward),
            gains=proportional_gains(step, members, remaining),
            gone=launches_removed(step, members, remaining),
            evidence=f"{describe_ops(step, members)} on {' x '.join(map(str, step.ops[activation].outputs[0].shape))} "
            f"move {quantity(step.bytes(members), 'B')} in {seconds(took)}; fused, "
            f"{quantity(total_bytes([*reads, *writes]), 'B')} would do.",
            reasoning=f"{passes} that reads gate and value and writes the result would take {seconds(remaining)}.",
            remedy=_remedy(step, activation),
            fix=_fix(step, activation),
        )


def _product(step: Step, index: int) -> int | None:
    """The product that alone reads the result of an activation in forward."""
    op = step.ops[index]
    if op.phase != "forward" or op.packet not in ACTIVATIONS or op.recomputed:
        return None
    readers = [reader for reader in step.flow.consumers[index] if step.ops[reader].phase == "forward"]
    if len(readers) != 1 or step.ops[readers[0]].packet not in ("aten.mul", "aten.mul_"):
        return None
    given, made = op.inputs[0], op.outputs[0]
    if made.storage in step.flow.results:
        return None
    for other in step.ops[readers[0]].inputs:
        own = other.storage == made.storage or _place(other) == _place(given)
        if other.elements == made.elements and not own:
            return readers[0]
    return None


def _place(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return tensor.storage, tensor.offset, tensor.strides


def _fix(step: Step, activation: int) -> Fix | None:
    op = step.ops[activation]
    if op.packet == "aten.silu":
        return step.nearpeak_kernel("swiglu", "(gate, up)")
    if op.packet != "aten.gelu":
        return None
    tanh = op.arguments.get("approximate", "none") == "tanh"
    return step.nearpeak_kernel("geglu", "(gate, up, approximate='tanh')" if tanh else "(gate, up)")


def _remedy(step: Step, activation: int) -> str:
    name = step.ops[activation].packet.removeprefix("aten.")
    call = f"torch.nn.functional.{name}(gate)" if name not in ("sigmoid", "tanh") else f"torch.{name}(gate)"
    return f"@torch.compile\ndef gated(gate, up):\n    return {call} * up"
