"""A matrix that is the same in every step, and nearly all zeros, is multiplied as a dense one: a graph's adjacency."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import GATHERED_PASSES, median_slowness
from nearpeak.ops.cost import Access
from nearpeak.units import percent, quantity, seconds


@rule("sparse-as-dense", needs=["storages"])
def sparse_as_dense(step: Step) -> Iterator[Waste]:
    """Products of activations with a matrix that was there before the step, compared with those of its elements."""
    written = {storage for storages in step.flow.written_by for storage in storages}
    for storage, nonzeros in step.trace.nonzeros.items():
        if storage in written or nonzeros.is_one_hot:
            continue  # rows that are moved
        zeros = 1 - nonzeros.share
        # A product with a parameter is a layer, whose other factor is a batch: that is another one in each step.
        members = [index for index in step.touched_by.get(storage, ()) if _is_product(step, index, storage)]
        forward = [index for index in members if step.ops[index].phase == "forward"]
        if not forward:
            continue
        # A CPU that other work holds is slow for what comes instead too.
        slower = median_slowness(step, members) if step.machine.kind == "cpu" else 1.0
        rest = {index: slower * _element_seconds(step, index, storage, zeros) for index in members}
        gains = {index: step.time(index) - rest[index] for index in members if step.time(index) > rest[index]}
        if not gains:
            continue
        largest = max(forward, key=step.time)
        matrix = next(tensor for tensor in step.ops[largest].inputs if tensor.storage == storage)
        yield Waste(
            title="A matrix that is nearly all zeros is multiplied as a dense one.",
            op=largest,
            gains=gains,
            replaces=True,
            evidence=f"{percent(zeros, 2)} of a matrix of {shape_text(matrix.shape)}, {quantity(matrix.bytes, 'B')}, "
            "are zeros, by a sample of its rows, and nothing in the step changes it. "
            f"{len(members)} products with it take {seconds(step.seconds(members))}.",
            reasoning="A gather and an `index_add` of the other elements, and their gradients, take "
            f"{seconds(sum(rest.values()))}; a sparse product may take less.",
            remedy="matrix = matrix.to_sparse_csr()  # once, before the first step\n"
            "out = matrix @ x                 # reads the elements that are not zero; or, with their places:\n"
            "out = torch.zeros_like(x).index_add(0, rows, x[columns] * values[:, None])",
        )


def _is_product(step: Step, index: int, storage: int) -> bool:
    """Whether an op multiplies a matrix by another that is no parameter."""
    op = step.ops[index]
    sizes = product_sizes(op)
    if sizes is None or sizes[0] != 1:
        return False
    factors = {op.tensor(name).storage for name in FACTORS[op.packet]}
    others = factors - {storage}
    return storage in factors and all(step.trace.storages[other].kind != "parameter" for other in others)


def _element_seconds(step: Step, index: int, storage: int, zeros: float) -> float:
    """The time of a product with the elements that are not zero."""
    op = step.ops[index]
    left, right = (op.tensor(name) for name in FACTORS[op.packet])
    matrix, width = (left, right.shape[-1]) if left.storage == storage else (right, left.shape[-2])
    size = (1 - zeros) * matrix.elements * width * matrix.item_bytes
    passes = step.expected_for_work([Access(storage=-1, bytes=size)], [Access(storage=-2, bytes=size)], kind="indexing")
    return GATHERED_PASSES[step.machine.kind] * passes
