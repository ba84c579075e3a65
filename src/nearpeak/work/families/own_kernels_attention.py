"""The operators of `nearpeak.kernels` for attention of whole sequences, forward and backward.

Keys and values that no query sees are not read, and neither is a part of a mask. Where packed sequences start is on the
device and not known here: certain is that each token is read and written, not how many see each other.
"""

from __future__ import annotations

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.attention_pairs import banded
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


def _seen(op: Op) -> tuple[int, int]:
    """How many queries and keys of a head see each other, and how many keys are seen at all."""
    queries, keys = op.tensor("query").shape[2], op.tensor("key").shape[2]
    if op.tensors("query_starts"):
        return 0, 0
    left, right = (None if op.arguments[name] < 0 else op.arguments[name] for name in ("left", "right"))
    offset = keys - queries if op.arguments["bottom_right"] else 0
    seen = banded(queries, keys, left=left, right=right, offset=offset)
    return seen.count, seen.keys[1]


def _cost(op: Op, reads: tuple[Tensor, ...], products: int) -> Cost:
    query, keys = op.tensor("query"), op.tensor("key").shape[2]
    pairs, seen = _seen(op)
    count = query.shape[0] * query.shape[1] * pairs
    matrix, vector = engines(query.dtype, float(products * count), tf32=False)
    each = dict(matrix or vector)
    if count:
        name = vector_dtype(query.dtype)
        vector[name] = vector.get(name, 0.0) + count
    parts = [(x, x.bytes * seen / max(keys, 1)) for x in op.tensors("key", "value")]
    return Cost(
        family="attention",
        reads=accesses(*reads, *parts),
        writes=accesses(*op.outputs),
        flops=matrix,
        vector_flops=vector,
        products=each,
    )


@formula("nearpeak.attention")
def attention(op: Op) -> Cost:
    """Reads queries, keys and values, writes the result and a number for each query and head.

    Two products for each pair that sees each other, and an exponential.
    """
    dims = op.tensor("query").shape[-1] + op.tensor("value").shape[-1]
    return _cost(op, op.tensors("query"), 2 * dims)


@formula("nearpeak.attention_backward")
def attention_backward(op: Op) -> Cost:
    """Reads these and the gradient and the result, and writes the gradients that are wanted.

    Products for each pair: scores and gradients by weights once more, and one for each gradient.
    """
    dim, value_dim = op.tensor("query").shape[-1], op.tensor("value").shape[-1]
    per_pair = 2 * (dim + value_dim)
    per_pair += 2 * dim * op.arguments["for_query"] + 2 * (dim + value_dim) * op.arguments["for_keys"]
    return _cost(op, op.tensors("gradient", "result", "lse", "query"), per_pair)
