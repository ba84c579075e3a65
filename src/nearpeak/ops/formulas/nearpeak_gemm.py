"""Costs of the GEMM operators of `nearpeak.kernels`: with an epilogue, grouped by expert, and whole MoE layers.

Which rows belong to which expert is data. Each row meets one matrix, whichever it is, so products are those of one
matrix and all rows; all of them could be of one expert, so one matrix is certain to be read. As for torch's grouped
product, every row is assumed to belong to some expert. Sources are those of `sort_tokens`, which name every token: each
is read once, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.matrix import engines, vector_dtype
from nearpeak.ops.formulas.pointwise import arithmetic
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@formula("nearpeak.gemm", "nearpeak.gemm_fp8")
def gemm(op: Op) -> Cost:
    """One product. Three operations a result for an activation, one each for a gate, a bias, a residual and scales.

    Reads both factors and what is added, and writes the result and what is kept of the product.
    """
    x, weight = op.tensor("x"), op.tensor("weight")
    result = op.outputs[0]
    if not result.elements:
        return Cost(family="matrix")
    before = x.elements // x.shape[-1] * weight.shape[0] if x.elements else 0
    beside = float(result.elements) * (len(op.tensors("residual")) + (1 if op.arguments["gated"] else 0))
    beside += float(before) * len(op.tensors("bias", "scale_x", "scale_weight"))
    if op.arguments["activation"]:
        beside += 3.0 * result.elements
    flops, vector_flops = engines(x.dtype, 2.0 * x.elements * weight.shape[0], tf32=op.tf32_products)
    dtype = vector_dtype(x.dtype)
    if beside:
        vector_flops = {**vector_flops, dtype: vector_flops.get(dtype, 0.0) + beside}
    return Cost(
        family="matrix",
        reads=accesses(x, weight, *op.tensors("bias", "residual", "scale_x", "scale_weight")),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
    )


@formula("nearpeak.gemm_backward")
def gemm_backward(op: Op) -> Cost:
    """A product for each wanted gradient of the two factors, and one more where the forward pass kept nothing.

    Four operations for each element that the activation was of, and a sum for the bias.
    """
    gradient, x, weight = op.tensor("gradient"), op.tensor("x"), op.tensor("weight")
    for_x, for_weight, for_bias = (bool(op.arguments[f"for_{name}"]) for name in ("x", "weight", "bias"))
    if not (for_x or for_weight or for_bias) or not x.elements:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    activation = bool(op.arguments["activation"])
    again = activation and not op.tensors("before")
    before = x.elements // x.shape[-1] * weight.shape[0]
    beside = float(before) * ((4 if activation else 0) + (1 if for_bias else 0))
    products = 2.0 * x.elements * weight.shape[0] * (for_x + for_weight + again)
    flops, vector_flops = engines(x.dtype, products, tf32=op.tf32_products)
    dtype = vector_dtype(x.dtype)
    if beside:
        vector_flops = {**vector_flops, dtype: vector_flops.get(dtype, 0.0) + beside}
    reads = [gradient, *op.tensors("before")]
    reads += [x] if for_weight or again else []
    reads += [weight] if for_x or again else []
    reads += list(op.tensors("bias")) if again else []
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
    )


Part = Tensor | tuple[Tensor, float]
"""A tensor, or so many bytes of it."""


@formula("nearpeak.route", "nearpeak.route_backward")
def route(op: Op) -> Cost:
    """Reads the logits (backward: the gradients and choices too), writes the results: three operations a logit."""
    logits = op.tensor("logits")
    return Cost(
        family="sorting" if op.packet.endswith("route") else "normalization",
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


@formula("nearpeak.grouped_gemm", "nearpeak.grouped_gemm_gated", "nearpeak.grouped_gemm_fp8", "nearpeak.gathered_gemm")
def grouped_product(op: Op) -> Cost:
    """One product of all rows, and for an activation three operations a result. Writes results and what is kept.

    Reads the rows, or the tokens that they are and which ones.
    """
    (rows,), weight = op.tensors("rows", "tokens"), op.tensor("weight")
    result = op.outputs[0]
    if not result.elements:
        return Cost(family="matrix")
    number, depth = result.shape[0], rows.shape[1]
    columns = weight.elements // weight.shape[0] // depth if depth else 0
    reads: list[Part] = [rows, _one_expert(weight), *op.tensors("sources", "row_scales")]
    reads += [(scales, scales.bytes / weight.shape[0]) for scales in op.tensors("weight_scales")]
    activated = result.elements if op.arguments.get("activation") else 0
    return _gemm_cost(op, rows.dtype, 2.0 * number * depth * columns, activated, reads)


@formula("nearpeak.moe")
def mixture_of_experts(op: Op) -> Cost:
    """Both products of all rows, and three operations for each number of an inner row.

    Reads tokens, weights, which rows are whose (the map says it, and the sources say no more) and one expert. Writes
    the results of tokens, and both factors of inner rows where they are kept. Inner rows, and what experts give before
    it is added up, are not charged: they could stay on the chip. What adding up takes is not either, as in
    `unpermute_rows`; a matrix engine could do it.
    """
    x, gate_up, down, row_map = (op.tensor(name) for name in ("x", "gate_up", "down", "row_map"))
    if not row_map.elements or not x.elements:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    (_, both, depth), inner = gate_up.shape, down.shape[2]
    products = 2.0 * row_map.elements * depth * (both + inner)
    reads = [x, op.tensor("weights"), row_map, _one_expert(gate_up), _one_expert(down)]
    return _gemm_cost(op, x.dtype, products, row_map.elements * inner, reads)


def _one_expert(matrices: Tensor) -> Tensor:
    """The first of them."""
    return replace(matrices, shape=(1, *matrices.shape[1:]))


def _gemm_cost(op: Op, dtype: str, products: float, activated: int, reads: Iterable[Part]) -> Cost:
    """So many FLOPs of products, and so many results of an activation; writes what comes out."""
    flops, vector_flops = engines(dtype, products, tf32=op.tf32_products)
    direct = flops or vector_flops
    if activated:
        beside = vector_dtype(dtype)
        vector_flops = {**vector_flops, beside: vector_flops.get(beside, 0.0) + 3.0 * activated}
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
        products=direct,
    )


@formula("nearpeak.grouped_weight_gradient", "nearpeak.gathered_weight_gradient")
def grouped_weight_gradient(op: Op) -> Cost:
    """Each row by its gradient, added to one matrix; all matrices are written. Tokens are read once for all rows."""
    gradient, rows, sources = op.tensor("gradient"), op.tensor("rows"), op.tensors("sources")
    number = sources[0].elements if sources else rows.shape[0]
    if not number:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    return _gemm_cost(op, rows.dtype, 2.0 * number * rows.shape[1] * gradient.shape[1], 0, (gradient, rows, *sources))


_GATE_BACKWARD = 9
"""Operations for each number of an inner row: four as `gated_backward` has, a product for the row, one by the weight
for the row and one for its gradient, and a product and a sum for the gradient of the weight."""


@formula("nearpeak.moe_gate_backward")
def experts_gate_backward(op: Op) -> Cost:
    """Reads the gradient of inner rows, both factors, the map and the weights; writes the gradients of the factors and
    of the weights, and the weighted inner rows."""
    upstream = op.tensor("upstream")
    return Cost(
        family="pointwise",
        reads=accesses(*op.inputs) if upstream.elements else (),
        writes=accesses(*op.outputs),
        vector_flops=arithmetic((upstream,), (), _GATE_BACKWARD * upstream.elements),
    )
