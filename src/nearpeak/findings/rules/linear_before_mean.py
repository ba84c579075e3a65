"""A linear layer runs on rows of which only the mean or the sum is used: of their mean it gives the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from nearpeak.bound.tiles import product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import seconds_by_size, share_left
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_PRODUCTS = {"aten.mm": "self", "aten.addmm": "mat1"}
"""Products of rows with a weight, and the argument with the rows."""
_CONVOLUTIONS = ("aten.convolution", "aten.conv1d", "aten.conv2d", "aten.conv3d")
_MEANS = ("aten.mean", "aten.sum", "aten._adaptive_avg_pool2d", "aten.adaptive_avg_pool2d")
_LEAST_ROWS = 4
"""Of one mean: with fewer, little is saved."""


@rule("linear-before-mean", needs=["storages", "lines"])
def linear_before_mean(step: Step) -> Iterator[Waste]:
    """Products of rows with a weight, and convolutions of single pixels, of which only a mean over rows is read."""
    for index, op in enumerate(step.ops):
        if op.phase != "forward" or op.recomputed or not step.time(index):
            continue
        sizes = _rows_and_columns(step, index)
        readers = step.forward_readers(index) if sizes is not None else []
        if sizes is None or len(readers) != 1 or step.flow.results.intersection(step.flow.written_by[index]):
            continue
        (reader,) = readers
        rows, columns, depth = sizes
        each = _rows_of_a_mean(step.ops[reader], rows, columns)
        if each is None or each < _LEAST_ROWS:
            continue
        left = {index: 1 / each, reader: depth / columns, **_backward(step, index, reader, each, depth / columns)}
        changes = {i: seconds_by_size(step, i) * (1 - share) for i, share in left.items()}
        share = share_left(changes.values())
        if not share:
            continue
        gains = {i: change * share for i, change in changes.items() if change > 0.0}
        yield Waste(
            title=f"A linear layer runs on {each} rows for each mean that is used.",
            op=index,
            gains=gains,
            evidence=f"{op.packet} makes {shape_text(op.outputs[0].shape)}, and only {step.ops[reader].packet} at "
            f"{step.ops[reader].source or 'a later line'} reads it: {len(left)} ops take "
            f"{seconds(step.seconds(left))}.",
            reasoning=f"The layer of a mean is the mean of the layer. The mean first leaves 1 of {each} rows to be "
            f"multiplied, and is taken of {depth} columns in place of {columns}.",
            remedy="y = linear(x.mean(dim=1))  # in place of linear(x).mean(dim=1); of a sum, the bias counts n times",
        )


def _rows_and_columns(step: Step, index: int) -> tuple[int, int, int] | None:
    """The rows that a linear layer makes, their columns, and those of its input."""
    op = step.ops[index]
    if op.packet in _PRODUCTS:
        sizes = product_sizes(op)
        if sizes is None or not _is_activation(step, op.tensor(_PRODUCTS[op.packet])):
            return None
        _, rows, columns, depth = sizes
        return rows, columns, depth
    if op.packet in _CONVOLUTIONS and not op.arguments.get("transposed", False):
        weight, images = op.tensor("weight"), op.tensor("input")
        if op.outputs[0].shape[2:] != images.shape[2:] or any(size != 1 for size in weight.shape[2:]):
            return None
        columns = weight.shape[0]
        return op.outputs[0].elements // columns, columns, images.shape[1]
    return None


def _is_activation(step: Step, rows: Tensor) -> bool:
    return step.trace.storages[rows.storage].kind not in ("parameter", "buffer")


def _rows_of_a_mean(op: Op, rows: int, columns: int) -> int | None:
    """How many rows become one, if an op takes the mean or the sum over whole rows, and nothing else."""
    if op.packet not in _MEANS or len(op.outputs) != 1 or op.inputs[0].elements != rows * columns:
        return None
    taken, made = op.inputs[0], op.outputs[0]
    if op.packet in ("aten.mean", "aten.sum"):
        given = op.arguments.get("dim")
        dimensions = {
            d % len(taken.shape) for d in (given if isinstance(given, (tuple, list)) else (given,)) if d is not None
        }
    else:
        dimensions = {len(taken.shape) - 2, len(taken.shape) - 1} if made.shape[-2:] == (1, 1) else set()
    along = [taken.strides[d] for d in dimensions if taken.shape[d] > 1]
    if not along or made.elements * math.prod(taken.shape[d] for d in dimensions) != taken.elements:
        return None
    kept = [
        (size, stride)
        for d, (size, stride) in enumerate(zip(taken.shape, taken.strides, strict=True))
        if d not in dimensions
    ]
    if not any(size == columns for size, _ in kept) or made.elements % columns:
        return None
    return rows // (made.elements // columns)


def _backward(step: Step, product: int, mean: int, each: int, wider: float) -> Mapping[int, float]:
    """What is left of the backward ops of both, by their lines."""
    left = {}
    for index, op in enumerate(step.ops):
        if op.phase != "backward" or op.recomputed:
            continue
        family, place = step.costs[index].family, (op.source, op.module)
        if place == (step.ops[product].source, step.ops[product].module) and family == step.costs[product].family:
            left[index] = 1 / each
        elif place == (step.ops[mean].source, step.ops[mean].module) and family in (
            "pointwise",
            "movement",
            "reduction",
        ):
            left[index] = wider
    return left
