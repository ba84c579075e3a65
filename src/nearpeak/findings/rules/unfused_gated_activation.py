"""A gated activation is two ops, `silu(a) * b`: the activation is written and read again."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import fusion_saving, measured_over_expected, ops_that_launch, with_backward
from nearpeak.findings.rules.unrolled_recurrence import ops_inside_cells
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.finding import Fix
from nearpeak.units import seconds

ACTIVATIONS = (
    *("aten.silu", "aten.gelu", "aten.sigmoid", "aten.relu", "aten.tanh", "aten.hardswish", "aten.mish"),
    *("aten.elu", "aten.softplus", "aten.leaky_relu", "aten.hardsigmoid"),
)


@rule("unfused-gated-activation", needs=["storages"], compiles=True)
def unfused_gated_activation(step: Step) -> Iterator[Waste]:
    """Activations whose result is read once in forward, by a multiplication with a tensor of the same size."""
    cells = ops_inside_cells(step)
    products = {
        frozenset((index, product)): index
        for index in range(len(step.ops))
        if index not in cells and (product := _product(step, index)) is not None
    }
    for region in with_backward(step, list(products)):
        activation = products[region.forward]
        times = measured_over_expected(step, ops_that_launch(step, region.members))
        saving = fusion_saving(step, region, times=times)
        yield Waste(
            title="A gated activation is two ops: the activation is written, and read again for the product.",
            op=max(region.forward),
            gains=saving.gains,
            gone=saving.gone,
            evidence=saving.evidence(step, f" on {shape_text(step.ops[activation].outputs[0].shape)}"),
            reasoning=f"{saving.kernels} that reads gate and value and writes the result would take "
            f"{seconds(saving.remaining_s)}.",
            remedy=_remedy(step, activation),
            fix=_fix(step, activation),
        )


def _product(step: Step, index: int) -> int | None:
    """The multiplication that is the only reader of an activation in forward."""
    op = step.ops[index]
    if op.phase != "forward" or op.packet not in ACTIVATIONS or op.recomputed:
        return None
    readers = step.forward_readers(index)
    if len(readers) != 1 or step.ops[readers[0]].packet not in ("aten.mul", "aten.mul_"):
        return None
    gate, result = op.inputs[0], op.outputs[0]
    if result.storage in step.flow.results:
        return None
    for factor in step.ops[readers[0]].inputs:
        own = factor.storage == result.storage or _place(factor) == _place(gate)
        if factor.elements == result.elements and not own:
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
