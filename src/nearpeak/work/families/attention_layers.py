"""Whole layers as one operator: multi-head attention and the encoder layer that torch's fast path runs in inference.

Counted: the products of the projections, of attention over all pairs and of the feed-forward part, one vector FLOP per
pair for the exponential; every operand read once, the results written. Norms and activations ride on these. Nested
inputs (sequences of different lengths) have no sizes here: what is written is charged.
"""

from __future__ import annotations

from nearpeak.work.cost import Cost, every, formula
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.op import Op


@formula("aten._native_multi_head_attention")
def _multi_head_attention(op: Op) -> Cost:
    """Projections in (three parts of one matrix) and out. The probabilities are written where they are asked for."""
    query, key = op.tensor("query"), op.tensor("key")
    if len(query.shape) != 3:
        return Cost(family="attention", writes=every(op.outputs), model="operands")
    width = query.shape[-1]
    projections = 2.0 * width * width * (2 * query.elements + 2 * key.elements) / width if width else 0.0
    pairs = query.shape[0] * query.shape[1] * key.shape[1]
    wanted = op.outputs if op.arguments.get("need_weights", True) else op.outputs[:1]
    return _layer(op, projections, pairs, wanted_results=len(wanted))


@formula("aten._transformer_encoder_layer_fwd")
def _encoder_layer(op: Op) -> Cost:
    """Four products of the width and two of the feed-forward part for each token."""
    source, wide = op.tensor("src"), op.tensor("ffn_weight_1")
    if len(source.shape) != 3:
        return Cost(family="attention", writes=every(op.outputs), model="operands")
    batch, length, width = source.shape
    products = 2.0 * batch * length * (4 * width * width + 2 * wide.elements)
    return _layer(op, products, batch * length * length, wanted_results=1)


def _layer(op: Op, products: float, pairs: int, *, wanted_results: int) -> Cost:
    heads, width = op.arguments["num_head" if "num_head" in op.arguments else "num_heads"], op.arguments["embed_dim"]
    dtype = op.inputs[0].dtype
    flops, vector = engines(dtype, products + 4.0 * pairs * width, tf32=op.tf32_products)
    alone = dict(flops or vector)
    if pairs:
        name = vector_dtype(dtype)
        vector[name] = vector.get(name, 0.0) + pairs * heads
    writes = every(op.outputs[:wanted_results])
    return Cost(
        family="attention", reads=every(op.inputs), writes=writes, flops=flops, vector_flops=vector, products=alone
    )
