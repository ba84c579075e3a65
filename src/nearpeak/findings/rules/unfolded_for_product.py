"""A convolution is written as windows that are copied and a product: each pixel is copied once for each window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nearpeak.bound.tiles import FACTORS
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import describe_ops
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

_COPIES = ("aten.clone", "aten._to_copy", "aten.copy_", "aten._unsafe_view")
_BACKWARD = ("aten.col2im", "aten.im2col", *_COPIES)
_LEAST_COPIES = 4.0
"""Of each element. Windows that overlap less, such as the frames of a sound, are many wide rows: products of those are
about as fast as a convolution with a long kernel."""
_MAX_COPIES = 3


class _Windows(NamedTuple):
    """Copies of windows, and the product that reads them."""

    copies: tuple[int, ...]
    product: int
    times: float
    """How often each element is copied."""


@rule("unfolded-for-product", needs=["storages"])
def unfolded_for_product(step: Step) -> Iterator[Waste]:
    """Copies of overlapping windows that only a product with a weight reads, and the copies of their gradients."""
    for index, op in enumerate(step.ops):
        times = _overlap(op) if op.phase == "forward" and not op.recomputed else 1.0
        windows = _windows(step, index, times) if times >= _LEAST_COPIES else None
        if windows is None:
            continue
        copied = step.ops[index].outputs[0]
        members = [*windows.copies, *_backward(step, windows, copied.elements)]
        gains = {i: step.time(i) for i in members if step.time(i)}
        yield Waste(
            title="A convolution is written as copies of windows and a product.",
            op=index,
            gains=gains,
            evidence=f"{op.packet} makes {shape_text(copied.shape)}, {quantity(copied.bytes, 'B')}, in which each "
            f"element is about {windows.times:.0f} times; only {step.ops[windows.product].packet} with a weight reads "
            f"it. {describe_ops(step, gains)} take {seconds(step.seconds(gains))}.",
            reasoning="A convolution reads the windows where they are. It multiplies as much as the product, which is "
            "taken to last as long; the copies go.",
            remedy="y = torch.nn.functional.conv2d(x, weight.view(out, channels, 3, 3), padding=1)\n"
            "# in place of weight @ unfold(x, 3, padding=1); groups=... for weights of single channels",
        )


def _overlap(op: Op) -> float:
    """How often an op copies each element of what it reads as windows."""
    if not op.inputs or not op.outputs:
        return 1.0
    source, copy = op.inputs[0], op.outputs[0]
    if op.packet == "aten.im2col":
        return copy.elements / max(1, source.elements)
    if op.packet not in _COPIES or any(size > 1 and not stride for size, stride in _dims(source)):
        return 1.0
    return source.elements * source.item_bytes / max(1.0, source.bytes)


def _dims(tensor: Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.strides, strict=True)


def _windows(step: Step, first: int, times: float) -> _Windows | None:
    """The copies from an op to the one product that reads them."""
    copies = [first]
    elements = step.ops[first].outputs[0].elements
    for _ in range(_MAX_COPIES):
        last = copies[-1]
        readers = step.forward_readers(last)
        if len(readers) != 1 or step.flow.results.intersection(step.flow.written_by[last]):
            return None
        (reader,) = readers
        op = step.ops[reader]
        if op.packet in FACTORS:
            windows = step.flow.written_by[last]
            factors = op.tensors(*FACTORS[op.packet])
            others = [tensor for tensor in factors if tensor.storage not in windows]
            is_weight = len(others) == 1 and _is_weight(step, reader, others[0], elements)
            return _Windows(tuple(copies), reader, times) if is_weight else None
        if op.packet not in _COPIES or op.outputs[0].elements != elements:
            return None
        copies.append(reader)
    return None


def _is_weight(step: Step, product: int, factor: Tensor, elements: int) -> bool:
    """Whether a factor is older than the step, or a copy of such a tensor, and smaller than the windows."""
    producer = step.flow.producers[product].get(factor.storage)
    if producer is None:
        return factor.elements < elements
    op = step.ops[producer]
    is_copy = op.packet in _COPIES and op.inputs[0].storage not in step.flow.producers[producer]
    return is_copy and factor.elements < elements


def _backward(step: Step, windows: _Windows, elements: int) -> list[int]:
    """The copies of the gradient of the windows."""
    lines = {(step.ops[index].source, step.ops[index].module) for index in windows.copies}
    return [
        index
        for index, op in enumerate(step.ops)
        if op.phase == "backward"
        and (op.packet == "aten.unfold_backward" or ((op.source, op.module) in lines and op.packet in _BACKWARD))
        and any(tensor.elements >= elements for tensor in op.inputs)
    ]
