"""The operators of `nearpeak.kernels` for layers of experts, but the permutation of tokens: see `own_kernels`.

Which rows belong to which expert is data. Each row meets one matrix, whichever it is, so products are those of one
matrix and all rows; all of them could be of one expert, so one matrix is certain to be read. Assumed is, as for torch's
grouped product, that every row belongs to some expert.
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.families.pointwise import arithmetic
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor

Part = Tensor | tuple[Tensor, float]
"""A tensor, or so many bytes of it."""


@formula("nearpeak.route", "nearpeak.route_backward")
def route(op: Op) -> Cost:
    """Reads the logits (backward: the gradients and choices too), writes the results: three operations a logit."""
    logits = op.tensor("logits")
    return Cost(
        family="sorting" if op.packet.endswith("route") else "normalisation",
        reads=accesses(*op.inputs),
        writes=accesses(*op.outputs),
        vector_flops=arithmetic((logits,), (), 3 * logits.elements),
    )


@formula("nearpeak.group_rows")
def group_rows(op: Op) -> Cost:
    """Reads the counts. Of the list of tiles no more is written than there are; certain is where experts begin."""
    counts = op.tensor("counts")
    (groups,) = op.outputs
    certain = groups.item_bytes * (counts.elements + 2)
    return Cost(family="sorting", reads=accesses(counts), writes=accesses((groups, certain)))


@formula("nearpeak.grouped_product", "nearpeak.grouped_gated", "nearpeak.grouped_eight")
def grouped_product(op: Op) -> Cost:
    """One product of all rows, and for an activation three operations a result. Writes results and what is kept."""
    rows, weight = op.tensor("rows"), op.tensor("weight")
    if not op.outputs[0].elements:
        return Cost(family="matrix")
    columns = weight.elements // weight.shape[0] // rows.shape[1] if rows.shape[1] else 0
    flops, vector_flops = engines(rows.dtype, 2.0 * rows.elements * columns, tf32=op.tf32_products)
    beside = 3.0 * op.outputs[0].elements if op.arguments.get("activation") else 0.0
    dtype = vector_dtype(rows.dtype)
    if beside:
        vector_flops = {**vector_flops, dtype: vector_flops.get(dtype, 0.0) + beside}
    reads: list[Part] = [rows, replace(weight, shape=(1, *weight.shape[1:])), *op.tensors("row_scales")]
    reads += [(scales, scales.bytes / weight.shape[0]) for scales in op.tensors("weight_scales")]
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
    )


@formula("nearpeak.grouped_weight_gradient")
def grouped_weight_gradient(op: Op) -> Cost:
    """Each row by its gradient, added to one matrix; all matrices are written."""
    gradient, rows = op.tensor("gradient"), op.tensor("rows")
    flops, vector_flops = engines(rows.dtype, 2.0 * rows.elements * gradient.shape[1], tf32=op.tf32_products)
    return Cost(
        family="matrix",
        reads=accesses(gradient, rows),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
    )
