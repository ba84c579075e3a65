"""The operators of `nearpeak.kernels` for linear attention, forward and backward: see `own_kernels`.

Its products can be taken in two orders. By states, a token costs the product of both sizes of a head, once for the sum
that it is added to and once for what it gets out of one. By pairs, as of softmax, short sequences cost less. Orders
that mix both by chunks are between them, so the least is the lower of the two.
"""

from __future__ import annotations

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


def _cost(op: Op, reads: tuple[Tensor, ...], by_states: float, by_pairs: float, beside: float) -> Cost:
    """`by_states` is in products of both sizes of a head, `by_pairs` in operations for each pair of tokens."""
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    batches, heads, queries, dim = query.shape
    keys = key.shape[2]
    pairs = queries * (queries + 1) // 2 if op.arguments["causal"] else queries * keys
    products = min(2.0 * dim * value.shape[3] * by_states, batches * heads * pairs * by_pairs)
    flops, vector_flops = engines(query.dtype, products, tf32=False)
    each = dict(flops or vector_flops)
    if beside:
        dtype = vector_dtype(query.dtype)
        vector_flops[dtype] = vector_flops.get(dtype, 0.0) + beside
    return Cost(
        family="attention",
        reads=accesses(*reads),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
        products=each,
    )


def _tokens(x: Tensor) -> float:
    """Tokens of all heads."""
    return float(x.elements // x.shape[-1]) if x.elements else 0.0


@formula("nearpeak.linear_attention")
def linear_attention(op: Op) -> Cost:
    """Reads queries, keys and values once, writes the result and a number for each query and head.

    One operation for each feature, and a division for each number of the result. Where there are no keys, nothing is
    read.
    """
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    if not query.elements or not key.elements:
        return Cost(family="attention", writes=accesses(*op.outputs))
    beside = float(query.elements + key.elements + op.outputs[0].elements)
    by_pairs = 2.0 * (query.shape[3] + value.shape[3])
    return _cost(op, (query, key, value), _tokens(query) + _tokens(key), by_pairs, beside)


@formula("nearpeak.linear_attention_backward")
def linear_attention_backward(op: Op) -> Cost:
    """Reads what the wanted gradients need, and writes these.

    By states: a sum over keys for the gradient of queries, one over queries for those of keys and values, and what each
    gets out of them. By pairs: the gradients of weights are shared by queries and keys, and values need the weights.
    One operation for each feature and for each slope of one, and two for each number of the result, whose product with
    its gradient is summed up.
    """
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    for_query, for_key, for_value = (bool(op.arguments[f"for_{name}"]) for name in ("query", "key", "value"))
    weights = for_query or for_key
    if not (weights or for_value) or not query.elements or not key.elements:
        return Cost(family="attention", writes=accesses(*op.outputs))
    dim, value_dim = query.shape[3], value.shape[3]
    reads = op.tensors("gradient", "norms", "query", "key") + (op.tensors("result", "value") if weights else ())
    by_states = (_tokens(query) + _tokens(key)) * for_query
    by_states += _tokens(query) * (for_key or for_value) + _tokens(key) * (for_key + for_value)
    by_pairs = 2.0 * (value_dim * weights + dim * (for_query + for_key) + (dim + value_dim) * for_value)
    beside = float(query.elements * (1 + for_query) + key.elements * (1 + for_key))
    beside += 2.0 * op.tensor("gradient").elements * weights
    return _cost(op, reads, by_states, by_pairs, beside)
