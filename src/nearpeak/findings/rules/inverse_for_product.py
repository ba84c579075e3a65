"""A matrix is inverted, and only products read the inverse: solving takes a third of the work, and is more exact."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.bound.tiles import product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.units import seconds

_INVERSES = ("aten.linalg_inv_ex", "aten.inverse", "aten.linalg_inv")
_PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.matmul", "aten.mv", "aten.addmv")
_LEAST_SIZE = 16
"""Smaller matrices take a launch, whatever is done with them."""


@rule("inverse-for-product", needs=["storages"])
def inverse_for_product(step: Step) -> Iterator[Waste]:
    """Inverses that only products with few columns read."""
    for index, op in enumerate(step.ops):
        if op.packet not in _INVERSES or op.phase != "forward" or op.recomputed or not step.time(index):
            continue
        size = op.inputs[0].shape[-1]
        inverse = op.outputs[0]
        readers = [i for i in step.forward_readers(index) if inverse.storage in step.flow.read_by[i]]
        columns = [_columns(step, reader, inverse.storage, size) for reader in readers]
        if size < _LEAST_SIZE or not readers or inverse.storage in step.flow.results or None in columns:
            continue
        wide = sum(count or 0 for count in columns)
        if wide >= size:
            continue
        # n^3 * 2 for the inverse; for the solution n^3 * 2 / 3, and its columns take what the products take.
        gains = {index: step.time(index) * 2 / 3}
        # Its gradient is two products of n x n matrices; that of a solution has the columns.
        gains |= {i: step.time(i) * (1 - wide / size) for i in _backward(step, index)}
        yield Waste(
            title="A matrix is inverted to be multiplied.",
            op=index,
            gains=gains,
            evidence=f"{op.packet} of {shape_text(op.inputs[0].shape)} takes {seconds(step.time(index))}, and only "
            f"products with {wide} columns in all read the inverse.",
            reasoning="Factors of the matrix take a third of the operations of its inverse, or a sixth where it is "
            "symmetric and positive definite; solving with them takes those of the products.",
            remedy="x = torch.linalg.solve(A, b)  # in place of torch.linalg.inv(A) @ b\n"
            "L = torch.linalg.cholesky(A); x = torch.cholesky_solve(b, L)  # for a covariance; its logarithmic "
            "determinant is 2 * L.diagonal().log().sum()",
        )


def _backward(step: Step, inverse: int) -> Iterator[int]:
    """The products of the gradient of an inverse."""
    for index, behind in step.trace.derivative_of.items():
        if behind == inverse and step.ops[index].packet in _PRODUCTS:
            yield index


def _columns(step: Step, reader: int, inverse: int, size: int) -> int | None:
    """The columns that a product with an inverse has besides; None if it is something else."""
    op = step.ops[reader]
    if op.packet not in _PRODUCTS or sum(tensor.storage == inverse for tensor in op.inputs) != 1:
        return None
    if op.packet in ("aten.mv", "aten.addmv"):
        return 1
    sizes = product_sizes(op)
    if sizes is None:
        return None
    _, m, n, k = sizes
    return min(m, n) if k == size else None
