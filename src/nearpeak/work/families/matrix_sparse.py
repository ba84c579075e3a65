"""Products with a factor that is half zeros in a fixed pattern: two of four numbers, as tensor cores take it.

Only the half that is stored is multiplied, so a result takes half of the multiply-adds of a full product, at the full
rate of the dtype: that is the doubled rate of such products, said with dense peaks. float32 runs in tf32. The stored
half, the places of its numbers and the other factor are read once, the result is written.
"""

from __future__ import annotations

from nearpeak.work.cost import Cost, every, formula
from nearpeak.work.families.matrix import engines, result
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


@formula("aten._cslt_sparse_mm")
def _compressed(op: Op) -> Cost:
    """Numbers and their places are stored in one tensor."""
    return _product(op, op.tensor("dense_B").shape[0], op.tensors("compressed_A", "dense_B", "bias", "alpha"))


@formula("aten._sparse_semi_structured_mm", "aten._sparse_semi_structured_addmm")
def _in_two_parts(op: Op) -> Cost:
    """`beta=0` means that the addend is not read."""
    added = op.tensors("input") if op.arguments.get("beta", 1) != 0 else ()
    return _product(op, op.tensor("mat2").shape[0], (*op.tensors("mat1", "mat1_meta", "mat2"), *added))


@formula("aten._sparse_semi_structured_linear")
def _linear(op: Op) -> Cost:
    return _product(op, op.tensor("input").shape[-1], op.tensors("input", "weight", "meta", "bias"))


def _product(op: Op, contracted: int, reads: tuple[Tensor, ...]) -> Cost:
    out = result(op)
    if not out.elements:
        return Cost(family="matrix")
    flops, vector = engines(reads[0].dtype, float(out.elements * contracted), tf32=True)
    return Cost(family="matrix", reads=every(reads), writes=every(op.written), flops=flops, vector_flops=vector)


@formula("aten._cslt_compress", "aten._to_sparse_semi_structured", "aten._sparse_semi_structured_tile")
def _compress(op: Op) -> Cost:
    """The dense matrix read, what is kept of it and the places written."""
    return Cost(family="movement", reads=every(op.tensors("input", "dense")), writes=every(op.written))
