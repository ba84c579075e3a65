"""Costs of the operators of `nearpeak.kernels`, except attention: streaming operators, losses, GEMMs and MoE layers.

Costs are those of the torch operators that they stand for, less the intermediates. Each operand is read once, each
result written once. Not charged: what arguments hide (keys after a query, halves of tables that hold each angle twice,
a gradient that nobody wants) and what values may hide (keys behind a mask, tokens whose choices are dropped).

`cross_entropy` reads nothing of a row whose target is ignored, and ignored targets are common: as in `loss`, one row of
logits is certain and not all of them. Gradients are written in full, zeros too. `linear_cross_entropy` multiplies all
tokens, whatever their targets: none is assumed to be ignored.

Which rows belong to which expert is data. Each row meets the matrix of one expert, so the FLOPs are those of one matrix
and all rows. All rows could belong to one expert, so only one matrix is certain to be read. As for torch's grouped
GEMM, every row is assumed to belong to some expert. Sources are those of `sort_tokens`, which name every token: each is
read once, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nearpeak.ops.cost import Cost, Family, Part, accesses, formula, least_bytes
from nearpeak.ops.formulas.attention import banded
from nearpeak.ops.formulas.matrix import product_cost
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, kept_part, pointwise_flops, read, total
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def _streamed(
    family: Family, reads: Iterable[Part], writes: Iterable[Part], main: Tensor, operations_per_element: float
) -> Cost:
    return Cost(
        family=family,
        reads=accesses(*reads),
        writes=accesses(*writes),
        vector_flops=arithmetic((main,), (), operations_per_element * distinct(main)),
    )


@formula("nearpeak.softmax", "nearpeak.log_softmax")
def softmax(op: Op) -> Cost:
    """Reads the keys that are seen, and their mask; writes the result. Exponential, sum and scaling for each key.

    Where there is a mask it may hide any key: no score is then certain to be read.
    """
    x, masks, share = op.tensor("x"), op.tensors("mask"), _causal_share(op, op.tensor("x"))
    scores = share if not masks else 0.0
    reads = [(x, scores * x.bytes), *((mask, share * mask.bytes) for mask in masks)]
    return _streamed("normalization", reads, op.written, x, 3 * scores)


@formula("nearpeak.softmax_backward", "nearpeak.log_softmax_backward")
def softmax_backward(op: Op) -> Cost:
    """Reads the gradient and the result where keys are seen, writes the gradient: a sum, a product, a difference."""
    gradient, result = op.tensor("gradient"), op.tensor("result")
    share = _causal_share(op, result)
    reads = [(tensor, share * tensor.bytes) for tensor in (gradient, result)]
    return _streamed("normalization", reads, op.written, gradient, 3 * share)


def _causal_share(op: Op, scores: Tensor) -> float:
    """The share of scores that causality leaves."""
    if not op.arguments.get("causal") or not scores.elements:
        return 1.0
    queries, keys = scores.shape[-2:]
    return banded(queries, keys, right=0, offset=keys - queries).count / (queries * keys)


_NORMS = {
    "nearpeak.rms_norm": 3,
    "nearpeak.layer_norm": 5,
    "nearpeak.add_rms_norm": 4,
    "nearpeak.add_layer_norm": 6,
}
"""Operations per element: those of torch's norms, and the addition."""


@formula(*_NORMS)
def norms(op: Op) -> Cost:
    """Reads the input, what is added to it and the parameters; writes the norm, the sum and the statistics."""
    return _streamed("normalization", read(op), op.written, op.tensor("x"), _NORMS[op.packet])


@formula("nearpeak.norm_backward")
def norm_backward(op: Op) -> Cost:
    """Reads the gradient, and what the gradients that are wanted need; writes these.

    The weight and the gradient of the sum are only for that of the input, and that of the bias alone needs no input.
    Per element: a product and a sum, and an addition where there is a gradient of the sum.
    """
    for_x, for_residual, for_weight, for_bias = op.arguments["wants"]
    if not (for_x or for_residual or for_weight or for_bias):
        return Cost(family="normalization")
    gradient = op.tensor("gradient")
    inputs: tuple[Tensor, ...] = ()
    if for_x or for_residual or for_weight:
        inputs += op.tensors("x", "statistics")
    operations = 2 if inputs else 1
    if for_x or for_residual:
        inputs += op.tensors("weight", "sum_gradient")
        operations += len(op.tensors("sum_gradient"))
    return _streamed("normalization", (gradient, *inputs), op.outputs, gradient, operations)


_POINTWISE = {
    "nearpeak.add": 1,
    "nearpeak.activation": 1,
    "nearpeak.activation_backward": 1,
    "nearpeak.activation_backward_with_bias": 2,
    "nearpeak.gated": 2,
    "nearpeak.gated_packed": 2,
    "nearpeak.gated_backward": 4,
    "nearpeak.gated_packed_backward": 2,
}
"""Operations per element of the largest result. The gradients of a product of an activation and another factor take the
activation, its derivative and two products; a packed result has two elements for each."""


@formula(*_POINTWISE)
def pointwise(op: Op) -> Cost:
    """Reads all operands once, writes the results. A bias takes an addition more, its gradient a sum."""
    inputs, outputs = read(op), op.written
    operations = _POINTWISE[op.packet] + len(op.tensors("bias"))
    flops_per_operation = pointwise_flops(op.packet, inputs, outputs)
    return Cost(
        family="pointwise",
        reads=accesses(*inputs),
        writes=accesses(*outputs),
        vector_flops={dtype: operations * count for dtype, count in flops_per_operation.items()},
    )


@formula("nearpeak.rotary", "nearpeak.rotary_pair", "nearpeak.rotary_")
def rotary(op: Op) -> Cost:
    """Reads heads and angles, writes the heads; in place, only the part of each head that is rotated is touched.

    Of a table of angles the rows of the tokens are read, each angle once; where tokens say which rows they have, they
    may all have the same one. Per number that is rotated: two products and a sum.
    """
    heads = op.tensors("x", "q", "k", "tensors")
    rotated = [replace(x, shape=(*x.shape[:-1], min(op.arguments["rotary_dim"], x.shape[-1]))) for x in heads]
    in_place = bool(op.mutated)
    return Cost(
        family="pointwise",
        reads=accesses(*(rotated if in_place else heads), *op.tensors("positions"), *_angles(op, heads)),
        writes=accesses(*(rotated if in_place else op.outputs)),
        vector_flops=total(arithmetic((x,), (), 3 * distinct(x)) for x in rotated),
    )


def _angles(op: Op, heads: tuple[Tensor, ...]) -> list[Part]:
    if not any(x.elements for x in heads):
        return []
    tokens = 1 if op.tensors("positions") else heads[0].shape[-2 if op.arguments["heads_first"] else -3]
    pairs = op.arguments["rotary_dim"] // 2
    return [
        (table, replace(table, shape=(*table.shape[:-2], tokens, pairs)).bytes) for table in op.tensors("cos", "sin")
    ]


@formula("nearpeak.dropout_add")
def dropout_add(op: Op) -> Cost:
    """Reads the residual, and x where it is kept; writes the sum. A product and an addition for each kept element."""
    keep = 1.0 - float(op.arguments["p"])
    x = op.tensor("x")
    return _streamed("random", (kept_part(x, keep), op.tensor("residual")), op.outputs, x, 2 * keep)


@formula("nearpeak.dropout_add_backward")
def dropout_add_backward(op: Op) -> Cost:
    """Reads the gradient where it is kept, writes that of x; a product for each kept element."""
    keep = 1.0 - float(op.arguments["p"])
    gradient = op.tensor("gradient")
    return _streamed("random", (kept_part(gradient, keep),), op.outputs, gradient, keep)


@formula("nearpeak.transpose_copy")
def transpose_copy(op: Op) -> Cost:
    """Reads x, writes the copy."""
    return Cost(family="movement", reads=accesses(*op.tensors("x")), writes=accesses(*op.outputs))


@formula("nearpeak.adamw_step")
def adamw(op: Op) -> Cost:
    """Reads gradients, both averages and parameters, these in float32 where they are kept so too; writes all but the
    gradients. Operations are those of torch's fused step: 12 for each parameter, and 2 for its decay.
    """
    masters = op.tensors("master_params")
    values = masters or op.tensors("params")
    operations = 12 + (2 if op.arguments["weight_decay"] else 0)
    return Cost(
        family="optimizer",
        reads=accesses(*values, *op.tensors("grads", "exp_avgs", "exp_avg_sqs")),
        writes=accesses(*op.tensors("params", "exp_avgs", "exp_avg_sqs"), *masters),
        vector_flops=total(arithmetic((value,), (), operations * distinct(value)) for value in values),
    )


_QUANTIZATION = {"nearpeak.quantize": 2, "nearpeak.dequantize": 1}
"""Operations per element: the largest of a block is found, and each multiplied by its scale."""


@formula(*_QUANTIZATION)
def quantize_fp8(op: Op) -> Cost:
    """Reads all operands once, writes the results. A tensor with one scale may stay in the cache meanwhile."""
    return _streamed("quantization", op.inputs, op.outputs, op.inputs[0], _QUANTIZATION[op.packet])


@formula("nearpeak.sort_tokens")
def sort_tokens(op: Op) -> Cost:
    """Reads the experts of the tokens, writes the counts, the row of each choice and the token of each row."""
    return Cost(family="sorting", reads=accesses(op.tensor("experts")), writes=accesses(*op.outputs))


@formula("nearpeak.permute_rows", "nearpeak.unpermute_rows", "nearpeak.unpermute_rows_backward")
def permute(op: Op) -> Cost:
    """Reads the map, and writes the results, zeros for dropped choices included. Of tokens, rows and weights it reads
    one: the others may be those of dropped choices, as where other devices have the experts.
    """
    places = op.tensor("row_map")
    taken = op.tensors("x", "gradient", "rows") if places.elements else ()
    weights = op.tensors("weights") if places.elements else ()
    reads: list[Part] = [(tensor, least_bytes(tensor, (0,))) for tensor in taken]
    reads += [(weight, weight.item_bytes) for weight in weights]
    return Cost(family="indexing", reads=accesses(places, *reads), writes=accesses(*op.outputs))


@formula(
    "nearpeak.cross_entropy",
    "nearpeak.cross_entropy_",
    "nearpeak.cross_entropy_backward",
    "nearpeak.cross_entropy_backward_",
)
def cross_entropy(op: Op) -> Cost:
    """Reads the targets and one row of logits; writes the loss and the statistics of the rows, or the gradient, or all.

    An exponential and a sum for each logit of that row; forward and backward alike.
    """
    logits, target = op.tensor("logits"), op.tensor("target")
    if not target.elements:
        return Cost(family="loss", writes=accesses(*op.written))
    row = least_bytes(logits, range(len(logits.shape) - 1))
    reads: list[Part] = [target, (logits, row), *_class_weights(op, "weight")]
    return Cost(
        family="loss",
        reads=accesses(*reads),
        writes=accesses(*op.written),
        vector_flops=arithmetic((logits,), (), 2 * row / logits.item_bytes),
    )


def _class_weights(op: Op, name: str) -> list[Part]:
    """Of the weights of classes one element, as all targets may be equal; all where targets are smoothed."""
    smoothed = bool(op.arguments.get("label_smoothing"))
    return [(weight, weight.bytes if smoothed else weight.item_bytes) for weight in op.tensors(name)]


@formula("nearpeak.scale_gradient_")
def scale_gradient(op: Op) -> Cost:
    """Reads the factor. Where that is 1, as for a loss on which `backward()` is called, the gradient stays as it is."""
    return Cost(family="pointwise", reads=accesses(op.tensor("factor")))


@formula("nearpeak.linear_cross_entropy", "nearpeak.linear_cross_entropy_backward")
def linear_cross_entropy(op: Op) -> Cost:
    """A product for the logits and one for each gradient that is wanted, of hidden states and of the weight.

    Logits are not in memory: the backward pass computes them again. Reads hidden states, weight, bias and targets
    (backward: and the statistics of the rows); writes the loss, what is kept of each row, and gradients. For each logit
    an exponential and a sum; a product and a difference more for its gradient, a sum for that of the bias.
    """
    hidden, weight, target = op.tensor("hidden"), op.tensor("weight"), op.tensor("target")
    wanted = [bool(op.arguments[f"for_{name}"]) for name in ("hidden", "weight", "bias")]
    backward = op.packet.endswith("backward")
    if not target.elements or (backward and not any(wanted)):
        return Cost(family="matrix", writes=accesses(*op.outputs))
    logits = float(target.elements * weight.shape[0])
    reads = (hidden, weight, target, *op.tensors("bias", "statistics"), *_class_weights(op, "class_weight"))
    return product_cost(
        "matrix",
        hidden.dtype,
        reads,
        op.outputs,
        flops=2.0 * logits * weight.shape[1] * (1 + wanted[0] + wanted[1]),
        other_flops=logits * (2 + (2 if any(wanted) else 0) + (1 if wanted[2] else 0)),
        tf32=op.tf32_products,
    )


@formula("nearpeak.gemm", "nearpeak.gemm_fp8")
def gemm(op: Op) -> Cost:
    """One GEMM. Its epilogue takes three operations per result for an activation, and one each for a gate, a bias, a
    residual and scales. Reads both factors and what is added; writes the result, and the product where it is saved.
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
    reads = (x, weight, *op.tensors("bias", "residual", "scale_x", "scale_weight"))
    return _gemm_cost(op, x.dtype, reads, flops=2.0 * x.elements * weight.shape[0], other_flops=beside)


@formula("nearpeak.gemm_backward")
def gemm_backward(op: Op) -> Cost:
    """A GEMM for each wanted gradient of the two factors, and one more where the forward pass saved no product.

    Four operations for each element before the activation, and a sum for the bias.
    """
    gradient, x, weight = op.tensor("gradient"), op.tensor("x"), op.tensor("weight")
    for_x, for_weight, for_bias = (bool(op.arguments[f"for_{name}"]) for name in ("x", "weight", "bias"))
    if not (for_x or for_weight or for_bias) or not x.elements:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    activation = bool(op.arguments["activation"])
    again = activation and not op.tensors("before")
    before = x.elements // x.shape[-1] * weight.shape[0]
    beside = float(before) * ((4 if activation else 0) + (1 if for_bias else 0))
    reads = [gradient, *op.tensors("before")]
    reads += [x] if for_weight or again else []
    reads += [weight] if for_x or again else []
    reads += list(op.tensors("bias")) if again else []
    flops = 2.0 * x.elements * weight.shape[0] * (for_x + for_weight + again)
    return _gemm_cost(op, x.dtype, reads, flops=flops, other_flops=beside)


def _gemm_cost(op: Op, dtype: str, reads: Iterable[Part], *, flops: float, other_flops: float = 0.0) -> Cost:
    return product_cost("matrix", dtype, reads, op.outputs, flops=flops, other_flops=other_flops, tf32=op.tf32_products)


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
    """Reads the counts and writes where each expert begins. How many tiles are listed is not known."""
    counts = op.tensor("counts")
    (groups,) = op.outputs
    certain = groups.item_bytes * (counts.elements + 2)
    return Cost(family="sorting", reads=accesses(counts), writes=accesses((groups, certain)))


@formula("nearpeak.grouped_gemm", "nearpeak.grouped_gemm_gated", "nearpeak.grouped_gemm_fp8", "nearpeak.gathered_gemm")
def grouped_gemm(op: Op) -> Cost:
    """One GEMM of all rows, and three operations per result for an activation. Writes the results, and the products
    where they are saved. Reads the rows, or the tokens and which of them each row is.
    """
    (rows,), weight = op.tensors("rows", "tokens"), op.tensor("weight")
    result = op.outputs[0]
    if not result.elements:
        return Cost(family="matrix")
    number, depth = result.shape[0], rows.shape[1]
    columns = weight.elements // weight.shape[0] // depth if depth else 0
    reads: list[Part] = [rows, _one_expert(weight), *op.tensors("sources", "row_scales")]
    reads += [(scales, scales.bytes / weight.shape[0]) for scales in op.tensors("weight_scales")]
    activation = 3.0 * result.elements if op.arguments.get("activation") else 0.0
    return _gemm_cost(op, rows.dtype, reads, flops=2.0 * number * depth * columns, other_flops=activation)


@formula("nearpeak.moe")
def moe(op: Op) -> Cost:
    """Both GEMMs of all rows, and three operations for each element of an inner row.

    Reads the tokens, their routing weights, the row map (the sources add nothing to it) and one expert. Writes the
    results of the tokens, and both factors of the inner rows where they are saved. Inner rows and the outputs of
    experts before they are summed are not charged: they could stay on the chip. Neither is the sum, as in
    `unpermute_rows`: a matrix engine could do it.
    """
    x, gate_up, down, row_map = (op.tensor(name) for name in ("x", "gate_up", "down", "row_map"))
    if not row_map.elements or not x.elements:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    (_, both, depth), inner = gate_up.shape, down.shape[2]
    flops = 2.0 * row_map.elements * depth * (both + inner)
    reads = [x, op.tensor("weights"), row_map, _one_expert(gate_up), _one_expert(down)]
    return _gemm_cost(op, x.dtype, reads, flops=flops, other_flops=3.0 * row_map.elements * inner)


def _one_expert(matrices: Tensor) -> Tensor:
    """The first expert."""
    return replace(matrices, shape=(1, *matrices.shape[1:]))


@formula("nearpeak.grouped_weight_gradient", "nearpeak.gathered_weight_gradient")
def grouped_weight_gradient(op: Op) -> Cost:
    """Outer products of rows and their gradients, summed by expert. All experts are written, tokens are read once."""
    gradient, rows, sources = op.tensor("gradient"), op.tensor("rows"), op.tensors("sources")
    number = sources[0].elements if sources else rows.shape[0]
    if not number:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    flops = 2.0 * number * rows.shape[1] * gradient.shape[1]
    return _gemm_cost(op, rows.dtype, (gradient, rows, *sources), flops=flops)


_GATE_BACKWARD = 9
"""Operations for each number of an inner row: four as `gated_backward` has, a product for the row, one by the weight
for the row and one for its gradient, and a product and a sum for the gradient of the weight."""


@formula("nearpeak.moe_gate_backward")
def moe_gate_backward(op: Op) -> Cost:
    """Reads the gradient of inner rows, both factors, the map and the weights; writes the gradients of the factors and
    of the weights, and the weighted inner rows."""
    upstream = op.tensor("upstream")
    return Cost(
        family="pointwise",
        reads=accesses(*op.inputs) if upstream.elements else (),
        writes=accesses(*op.outputs),
        vector_flops=arithmetic((upstream,), (), _GATE_BACKWARD * upstream.elements),
    )
