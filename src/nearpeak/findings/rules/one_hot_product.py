"""Rows of a matrix are selected by a product with one-hot vectors: a lookup reads those rows alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_PRODUCTS = {"aten.mm": ("self", "mat2"), "aten.addmm": ("mat1", "mat2")}
_PASSED_ON = ("aten._to_copy", "aten.clone", "aten.copy")


@rule("one-hot-product", needs=["storages"])
def one_hot_product(step: Step) -> Iterator[Waste]:
    """GEMMs whose left factor has one 1 in each row, with the ops that make that factor."""
    for index, op in enumerate(step.ops):
        if op.packet not in _PRODUCTS or op.phase != "forward":
            continue
        left, right = (op.tensor(name) for name in _PRODUCTS[op.packet])
        made = _one_hot_ops(step, index, left)
        if not made:
            continue
        backward = [reader for position in made for reader in _products_backward(step, position, left, right)]
        lookup = step.expected(_embedding(step, left, right))
        if lookup is None:
            continue
        gains = {member: step.time(member) for member in made if step.time(member)}
        gains[index] = max(0.0, step.time(index) - lookup)
        for member in dict.fromkeys(backward):
            scatter = step.expected(_embedding_backward(step, left, right)) or 0.0
            gains[member] = max(0.0, step.time(member) - scatter)
        took = step.seconds(gains)
        yield Waste(
            title="Rows are selected by a product with one-hot vectors.",
            op=index,
            gains=gains,
            evidence=f"{op.packet} of one-hot {shape_text(left.shape)} by {shape_text(right.shape)}, with "
            f"{len(made)} ops that make the one-hot vectors"
            + (" and its gradient" if backward else "")
            + f", take {seconds(took)}.",
            reasoning=f"A lookup of {left.shape[0]:,} rows reads and writes those alone, in {seconds(lookup)}"
            + (", and its gradient adds to those alone." if backward else "."),
            remedy="torch.nn.functional.embedding(indices, weight)  # in place of one_hot(indices) @ weight",
        )


def _one_hot_ops(step: Step, index: int, left: Tensor) -> list[int]:
    """The ops that made a matrix of one-hot rows; none if it is another matrix."""
    made: list[int] = []
    storage, at = left.storage, index
    while (producer := step.flow.producers[at].get(storage)) is not None:
        op = step.ops[producer]
        made.append(producer)
        if op.packet in ("aten.scatter_", "aten.scatter"):
            ones = op.arguments.get("value") == 1 and op.tensor("index").shape[-1] == 1
            if not ones or op.outputs[0].shape[-1] != left.shape[-1]:
                return []
            zeroed = step.flow.producers[producer].get(op.tensor("self").storage)
            return [*made, zeroed] if zeroed is not None else made
        if op.packet not in _PASSED_ON:
            return []
        storage, at = op.inputs[0].storage, producer
    return []


def _products_backward(step: Step, one_hot: int, left: Tensor, right: Tensor) -> list[int]:
    """The products of the backward pass that read the one-hot matrix, for the gradient of the other factor."""
    return [
        reader
        for reader in step.flow.consumers[one_hot]
        if step.ops[reader].phase == "backward"
        and step.ops[reader].packet in _PRODUCTS
        and set(step.ops[reader].outputs[0].shape) == {left.shape[-1], right.shape[-1]}
    ]


def _new(step: Step, number: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return Tensor(shape=shape, strides=strides, dtype=dtype, storage=max(step.trace.storages, default=0) + number)


def _embedding(step: Step, left: Tensor, right: Tensor) -> Op:
    rows, table = left.shape[0], _new(step, 1, right.shape, right.dtype)
    arguments = {"weight": table, "indices": _new(step, 2, (rows,), "int64"), "padding_idx": -1}
    out = _new(step, 3, (rows, right.shape[-1]), right.dtype)
    return Op(name="aten.embedding.default", arguments=arguments, outputs=(out,))


def _embedding_backward(step: Step, left: Tensor, right: Tensor) -> Op:
    rows, width = left.shape[0], right.shape[-1]
    arguments = {
        "grad_output": _new(step, 1, (rows, width), right.dtype),
        "indices": _new(step, 2, (rows,), "int64"),
        "num_weights": right.shape[0],
        "padding_idx": -1,
        "scale_grad_by_freq": False,
    }
    out = _new(step, 3, (right.shape[0], width), right.dtype)
    return Op(name="aten.embedding_dense_backward.default", arguments=arguments, outputs=(out,))
