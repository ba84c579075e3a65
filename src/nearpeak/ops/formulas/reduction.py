"""Reductions: the input is read once, the result is written once; scratch of several passes is not in the floor."""

from __future__ import annotations

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, read
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def reduction_flops(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> dict[str, float]:
    """One operation for every element but the first of each result: n numbers are added in n - 1 steps.

    Elements of an expanded dimension count once: a multiplication stands for their sum.
    """
    if not inputs or not outputs:
        return {}
    count = max(distinct(tensor) for tensor in inputs) - max(tensor.elements for tensor in outputs)
    return arithmetic(inputs, (), max(count, 0.0))


@formula(
    *(
        f"aten.{name}"
        for name in """
        _aminmax _is_all_true _is_any_true all amax amin aminmax any argmax argmin count_nonzero dist hash_tensor
        linalg__powsum
        linalg_vector_norm logsumexp max.default max.dim max.dim_max max.unary_out mean min.default min.dim
        min.dim_min min.unary_out nanmean nansum norm native_norm prod std std_mean sum var var_mean
        """.split()
    )
)
def reduction(op: Op) -> Cost:
    """Reads the input once, writes the results (values, indices); n - 1 operations for n floating-point numbers."""
    inputs, outputs = read(op), op.written
    return Cost(
        family="reduction",
        reads=accesses(*inputs),
        writes=accesses(*outputs),
        vector_flops=reduction_flops(inputs, outputs),
    )


@formula("aten.trace")
def trace(op: Op) -> Cost:
    """Reads the diagonal alone."""
    matrix = op.tensor("self")
    length = min(matrix.shape)
    return Cost(
        family="reduction",
        reads=accesses((matrix, min(length * matrix.item_bytes, matrix.bytes))),
        writes=accesses(*op.written),
        vector_flops=arithmetic((matrix,), (), float(max(length - 1, 0))),
    )
