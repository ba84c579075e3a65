"""Elements are selected or moved by a product with a matrix of few ones: a lookup touches those alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import GATHERED_PASSES, median_slowness
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Nonzeros, Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_MOST_IN_A_ROW = 8
"""Elements that are not zero: a matrix with more of them in a row does more than to move rows."""
_EXPANDED = 16
"""A tensor with this many times the elements that are not zero is there for the product alone."""


@rule("one-hot-product", needs=["storages"])
def one_hot_product(step: Step) -> Iterator[Waste]:
    """GEMMs, and sums of products, with a factor of few elements that are not zero in each row."""
    yield from _products(step)
    yield from _weighted_sums(step)


def _products(step: Step) -> Iterator[Waste]:
    """GEMMs with such a factor, and the ops that make it."""
    gone: set[int] = set()
    """Ops that a factor before has claimed: one may be made of another."""
    for storage, nonzeros in step.trace.nonzeros.items():
        products = [index for index in step.touched_by.get(storage, ()) if _has_factor(step.ops[index], storage)]
        forward = [index for index in products if step.ops[index].phase == "forward"]
        if not forward or not _moves_rows(step, storage, nonzeros, forward[0]):
            continue
        matrix = next(tensor for tensor in step.ops[forward[0]].inputs if tensor.storage == storage)
        count = nonzeros.share * matrix.elements
        counts = _counts(step, storage, matrix)
        made = _made_for(step, [*forward, *counts], count, gone)
        backward = _backward(step, {*forward, *made}, matrix) - gone
        # A CPU that other work holds is slow for what comes instead too.
        members = {*products, *counts, *backward}
        slower = median_slowness(step, forward) if step.machine.kind == "cpu" else 1.0
        rest = {index: slower * _left(step, index, matrix, nonzeros) for index in members}
        gains = {index: step.time(index) for index in made if step.time(index)}
        gains |= {index: step.time(index) - rest[index] for index in members if step.time(index) > rest[index]}
        if not any(index in gains for index in products):
            continue
        gone |= {*made, *members}
        largest = max(forward, key=step.time)
        op, took = step.ops[largest], step.seconds({*made, *members})
        yield Waste(
            title="Rows are selected by a product with one-hot vectors.",
            op=largest,
            gains=gains,
            gone=made,
            replaces=True,
            evidence=f"{op.packet} of {' by '.join(shape_text(op.tensor(name).shape) for name in FACTORS[op.packet])}: "
            f"{nonzeros.per_row:.2g} elements in a row of {shape_text(matrix.shape)} are not zero, by a sample of its "
            f"rows. With {len(made)} ops that make it"
            + (" and the gradients" if backward else "")
            + f", {len(gains)} ops take {seconds(took)}.",
            reasoning="A lookup"
            + (" and its gradient" if backward else "")
            + f" reads and writes those rows alone, in {seconds(sum(rest.values()))}.",
            remedy=_LOOKUP if nonzeros.is_one_hot else _MOVES,
        )


_LOOKUP = (
    "torch.nn.functional.embedding(indices, weight)  # in place of one_hot(indices) @ weight\n"
    "x.index_select(0, indices)                      # of activations"
)
_MOVES = (
    "out = x.index_select(0, indices)                 # in place of one_hot(indices) @ x\n"
    "out = zeros.index_add(0, indices, x * weights)   # in place of one_hot(indices).T @ x"
)


_PICKS = (
    "log_probabilities.gather(-1, targets[..., None])         # in place of (one_hot * log_probabilities).sum(-1)\n"
    "F.cross_entropy(logits, targets, label_smoothing=0.1)    # with smoothed targets too"
)


def _weighted_sums(step: Step) -> Iterator[Waste]:
    """Sums over rows of `weights * x`, where the weights are one-hot vectors, or these times a number plus another."""
    makers: dict[int, dict[int, list[int]]] = {}
    """Those of one-hot vectors, by the number of elements and the storage."""
    for storage, nonzeros in step.trace.nonzeros.items():
        made = [index for index in step.touched_by.get(storage, ()) if storage in step.flow.written_by[index]]
        if made and nonzeros.is_one_hot and nonzeros.per_row == 1:
            elements = max(tensor.elements for tensor in step.ops[made[0]].written)
            makers.setdefault(elements, {})[storage] = made
    smoothed = _smoothed_targets(step, {storage for of_storages in makers.values() for storage in of_storages})
    for elements, of_storages, added in [
        *((elements, of_storages, False) for elements, of_storages in makers.items()),
        *((elements, {storage: made}, True) for storage, (elements, made) in smoothed.items()),
    ]:
        chain = _weighted_sum(step, elements, of_storages)
        if chain is None:
            continue
        members, reductions, shifted = chain
        shifted = shifted or added
        # With a number added to the weights, the sum of all of `x` remains, and its gradient is added to the other one:
        # a pass that takes what the product takes.
        summed = {writer for index in reductions for writer in step.flow.producers[index].values()}
        gone = members | reductions if not shifted else members - summed if step.trains else members
        gains = {index: step.time(index) for index in gone}
        vectors = step.ops[min(members)].written[0]
        yield Waste(
            title="A sum over classes is weighted with "
            + ("targets of which one in a row differs." if added else "one-hot vectors."),
            op=max(members, key=step.time),
            gains=gains,
            replaces=True,
            evidence=f"{'Smoothed targets' if added else 'One-hot vectors'} of {shape_text(vectors.shape)} are made "
            f"and multiplied with numbers that are "
            f"then summed up: {len(members | reductions)} ops take {seconds(step.seconds(members | reductions))}.",
            reasoning="One element in each row counts"
            + (", and the sum of the row; the other ops go." if shifted else ", which a gather reads. These ops go."),
            remedy=_PICKS,
        )


def _smoothed_targets(step: Step, known: Collection[int]) -> dict[int, tuple[int, list[int]]]:
    """Storages that are filled with a number, and then with another one at one place of each row: the number of their
    elements, and the ops that make them."""
    found = {}
    for index, op in enumerate(step.ops):
        if op.packet.rstrip("_") not in _ONE_IN_A_ROW or op.phase != "forward" or not op.written:
            continue
        target, filled = op.written[0], op.inputs[0]
        if target.storage in known or len(target.shape) < 2 or not _is_one_in_each_row(op, target):
            continue
        writers = [i for i in step.touched_by[target.storage] if target.storage in step.flow.written_by[i]]
        if filled.storage != target.storage:
            fill = step.flow.producers[index].get(filled.storage)
            writers = [*([] if fill is None else [fill]), *writers]
        fills = [i for i in writers if i < index and _fills(step, i, target.elements)]
        if fills and all(i <= fills[-1] or i == index or _writes_a_number(step.ops[i]) for i in writers):
            found[target.storage] = (target.elements, writers)
    return found


_ONE_IN_A_ROW = ("aten.scatter", "aten.index_put")


def _is_one_in_each_row(op: Op, target: Tensor) -> bool:
    """Whether an op writes a number to one element of each row."""
    rows = target.elements // max(1, target.shape[-1])
    value = op.arguments.get("value", op.arguments.get("values", op.arguments.get("src")))
    is_number = not isinstance(value, Tensor) or value.elements == 1
    if op.packet.startswith("aten.scatter"):
        index = op.arguments.get("index")
        along = op.arguments.get("dim") in (-1, len(target.shape) - 1)
        return is_number and along and isinstance(index, Tensor) and index.elements == rows
    indices = [item for item in op.arguments.get("indices") or () if isinstance(item, Tensor)]
    picked = max((item.elements for item in indices if item.dtype != "bool"), default=0)
    return is_number and len(indices) == len(target.shape) and picked == rows


def _fills(step: Step, index: int, elements: int) -> bool:
    op = step.ops[index]
    return step.costs[index].family == "creation" and any(tensor.elements == elements for tensor in op.written)


def _writes_a_number(op: Op) -> bool:
    """Whether an op writes the same everywhere, or at places that a mask or indices name."""
    others = [tensor for tensor in op.inputs if tensor.storage != op.written[0].storage and tensor.elements > 1]
    return bool(op.mutated) and all(tensor.dtype in ("bool", "int64") for tensor in others)


def _weighted_sum(step: Step, elements: int, makers: Mapping[int, list[int]]) -> tuple[set[int], set[int], bool] | None:
    """The ops that make one-hot vectors and multiply them, those that sum up, and whether a number is added before.

    None if the vectors are used in another way too.
    """
    members, reductions, shifted = {index for made in makers.values() for index in made}, set[int](), False
    weights, weighted = set(makers), set[int]()
    for index in range(min(members) + 1, len(step.ops)):
        if index in members:
            continue
        op, family = step.ops[index], step.costs[index].family
        large = {tensor.storage for tensor in op.inputs if tensor.elements == elements}
        if op.phase != "forward" or family == "view" or not large & (weights | weighted):
            continue
        written = set(step.flow.written_by[index])
        if family in ("pointwise", "movement") and large <= weights and not op.mutated:
            shifted = shifted or any(name in op.packet for name in ("add", "sub"))
            weights |= written
        elif op.packet in _LINEAR and (large <= weighted or (op.packet == "aten.mul" and not large & weighted)):
            weighted |= written
        elif op.packet in _DIVERGENCES and large & weighted and large <= weights | weighted:
            weighted |= written  # the divergence: weights * log(weights) - weights * x
        elif family == "reduction" and large <= weighted and _sums_rows(op):
            reductions.add(index)
            continue
        else:
            return None
        members.add(index)
    if not reductions or step.flow.results & (weights | weighted):
        return None
    return members, reductions, shifted


_DIVERGENCES = ("aten.sub", "aten.add")
_LINEAR = ("aten.neg", "aten.mul", "aten.div", "aten._to_copy")


def _sums_rows(op: Op) -> bool:
    """Whether a reduction adds up the last dimension, among others or not."""
    dims = op.arguments.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    last = len(op.inputs[0].shape) - 1
    return op.packet in ("aten.sum", "aten.mean") and (not dims or any(dim % (last + 1) == last for dim in dims))


def _has_factor(op: Op, storage: int) -> bool:
    return op.packet in FACTORS and any(tensor.storage == storage for tensor in op.tensors(*FACTORS[op.packet]))


def _is_parameter(step: Step, op: Op, storage: int) -> bool:
    """Whether the other factor is a parameter, directly or in another dtype."""
    others = [tensor.storage for tensor in op.tensors(*FACTORS[op.packet]) if tensor.storage != storage]
    return any(step.trace.storages[other].kind == "parameter" for other in others)


def _moves_rows(step: Step, storage: int, nonzeros: Nonzeros, product: int) -> bool:
    """Whether a factor is one-hot, or made in the step with few elements in a row."""
    if nonzeros.is_one_hot:
        return True
    made = any(storage in step.flow.written_by[index] for index in step.touched_by[storage])
    return made and nonzeros.most_in_row <= _MOST_IN_A_ROW and not _is_parameter(step, step.ops[product], storage)


def _made_for(step: Step, products: list[int], count: float, gone: set[int]) -> set[int]:
    """The ops behind the factor whose results are much larger than what it says, and read for these products alone."""
    members = {*products, *gone}
    waiting = list(products)
    while waiting:
        index = waiting.pop()
        for storage, producer in step.flow.producers[index].items():
            if producer in members or (index in products and storage not in step.trace.nonzeros):
                continue  # the other factor
            elements = max((tensor.elements for tensor in step.ops[producer].written), default=0)
            is_read = {reader for reader in step.forward_readers(producer) if reader != producer}
            if (
                elements >= _EXPANDED * count
                and members >= is_read
                and step.flow.results.isdisjoint(step.flow.written_by[producer])
            ):
                members.add(producer)
                waiting.append(producer)
    return members - {*products, *gone}


def _counts(step: Step, storage: int, matrix: Tensor) -> list[int]:
    """Sums of the whole factor along one dimension: how often each row is selected, which an `index_add` counts too."""
    return [
        index
        for index in step.touched_by[storage]
        if step.ops[index].packet == "aten.sum"
        and step.ops[index].phase == "forward"
        and step.ops[index].inputs[0].elements == matrix.elements
        and step.ops[index].outputs[0].elements < matrix.elements
    ]


def _backward(step: Step, forward: set[int], matrix: Tensor) -> set[int]:
    """The ops of the backward pass of these lines that touch tensors as large as those that go."""
    places = {(step.ops[index].source, step.ops[index].module) for index in forward if step.ops[index].source}
    made = [index for index in forward if step.ops[index].packet not in FACTORS]
    sizes = {matrix.elements, *(tensor.elements for index in made for tensor in step.ops[index].written)}
    return {
        index
        for index, op in enumerate(step.ops)
        if op.phase == "backward"
        and (op.source, op.module) in places
        and any(
            tensor.elements in (sizes if op.packet not in FACTORS else (matrix.elements,))
            for tensor in (*op.inputs, *op.written)
        )
        and step.time(index)
    }


def _left(step: Step, index: int, matrix: Tensor, nonzeros: Nonzeros) -> float:
    """The time of what takes the place of an op: nothing for one that only spreads the elements."""
    op = step.ops[index]
    sizes, rows = product_sizes(op), nonzeros.share * matrix.elements
    if sizes is None and op.phase == "forward":  # the sums of the factor
        read = Access(storage=-1, bytes=rows * matrix.item_bytes)
        return step.expected_for_work([read], step.costs[index].writes, kind="indexing")
    if sizes is None:
        return 0.0
    width = math.prod(sizes) / matrix.elements
    if op.phase == "forward" and nonzeros.is_one_hot:
        return step.expected(_lookup(step, round(rows), round(width), matrix.dtype)) or 0.0
    size = rows * width * matrix.item_bytes
    moved = step.expected_for_work([Access(storage=-1, bytes=size)], [Access(storage=-2, bytes=size)], kind="indexing")
    return GATHERED_PASSES[step.machine.kind] * moved


def _lookup(step: Step, rows: int, width: int, dtype: str) -> Op:
    def new(number: int, *shape: int, dtype: str = dtype) -> Tensor:
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        return Tensor(shape=shape, strides=strides, dtype=dtype, storage=max(step.trace.storages, default=0) + number)

    arguments = {"weight": new(1, rows, width), "indices": new(2, rows, dtype="int64"), "padding_idx": -1}
    return Op(name="aten.embedding.default", arguments=arguments, outputs=(new(3, rows, width),))
