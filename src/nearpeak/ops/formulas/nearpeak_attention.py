"""Costs of the attention operators of `nearpeak.kernels`: whole sequences, decoding with a cache, linear attention.

Keys and values that no query sees are not read, and neither is a part of a mask. Where packed sequences start, and how
long sequences in a cache are, is on the device and not known here. For packed sequences it is certain that each token
is read and written, not how many see each other. For a cache, the floor is attention of the new tokens among
themselves, as older ones may be few and pages may be shared by all sequences.

The products of linear attention can be taken in two orders. By states, a token costs the product of both sizes of a
head, once to add it to the sum and once to read from it. By pairs, as in softmax attention, short sequences cost less.
Chunked orders are between them, so the least is the lower of the two.
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.attention import banded
from nearpeak.ops.formulas.matrix import product_cost
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, total
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def _visible_pairs(op: Op) -> tuple[int, int]:
    """The pairs of a query and a key of a head that see each other, and the keys that any query sees."""
    queries, keys = op.tensor("query").shape[2], op.tensor("key").shape[2]
    if op.tensors("query_starts"):
        return 0, 0
    sides = (op.arguments.get(name, -1) for name in ("left", "right"))
    left, right = (None if side < 0 else side for side in sides)
    offset = keys - queries if op.arguments["bottom_right"] else 0
    pairs = banded(queries, keys, left=left, right=right, offset=offset)
    return pairs.count, pairs.keys[1]


def _attention_cost(op: Op, reads: tuple[Tensor, ...], flops_per_pair: int, dtype: str = "") -> Cost:
    """One exponential per pair beside the products. Of keys and values, what some query sees is read."""
    query, keys = op.tensor("query"), op.tensor("key").shape[2]
    pairs, visible_keys = _visible_pairs(op)
    count = query.shape[0] * query.shape[1] * pairs
    parts = [(x, x.bytes * visible_keys / max(keys, 1)) for x in op.tensors("key", "value")]
    flops = float(flops_per_pair * count)
    dtype = dtype or query.dtype
    return product_cost("attention", dtype, (*reads, *parts), op.outputs, flops=flops, other_flops=count)


@formula("nearpeak.attention")
def attention(op: Op) -> Cost:
    """Reads queries, keys and values, writes the result and a number for each query and head.

    Two products for each pair that sees each other, and an exponential.
    """
    dims = op.tensor("query").shape[-1] + op.tensor("value").shape[-1]
    return _attention_cost(op, op.tensors("query"), 2 * dims)


@formula("nearpeak.attention_fp8")
def attention_fp8(op: Op) -> Cost:
    """The same with products of 8 bits; queries, keys and values are read as they are."""
    dims = op.tensor("query").shape[-1] + op.tensor("value").shape[-1]
    return _attention_cost(op, op.tensors("query"), 2 * dims, dtype="float8_e4m3fn")


@formula("nearpeak.attention_backward")
def attention_backward(op: Op) -> Cost:
    """Reads these and the gradient and the result, and writes the gradients that are wanted.

    Products for each pair: scores and gradients by weights once more, and one for each gradient.
    """
    dim, value_dim = op.tensor("query").shape[-1], op.tensor("value").shape[-1]
    per_pair = 2 * (dim + value_dim)
    per_pair += 2 * dim * op.arguments["for_query"] + 2 * (dim + value_dim) * op.arguments["for_keys"]
    return _attention_cost(op, op.tensors("gradient", "result", "lse", "query"), per_pair)


@formula("nearpeak.decode_attention")
def decode_attention(op: Op) -> Cost:
    """Reads queries and the keys and values of the new tokens, writes the result and a number for each query.

    Two products for each pair of tokens that sees each other, and an exponential.
    """
    query, keys, values = op.tensor("query"), op.tensor("key_cache"), op.tensor("value_cache")
    batch, heads, new, dim = query.shape
    paged = bool(op.tensors("pages"))
    window = op.arguments["window"]
    pairs = banded(new, new, right=0, left=None if window < 0 else window)
    count = batch * heads * pairs.count
    key_heads = keys.shape[2 if paged else 1]
    rows = (1 if paged else batch) * key_heads * new if count else 0
    caches = (keys,) if op.arguments.get("shared") else (keys, values)  # values may be columns of keys
    return product_cost(
        "attention",
        query.dtype,
        (query, op.tensor("lengths"), *(_cache_rows(cache, rows) for cache in caches)),
        op.outputs,
        flops=2.0 * (dim + values.shape[-1]) * count,
        other_flops=count,
    )


def _cache_rows(cache: Tensor, rows: int) -> tuple[Tensor, float]:
    """So many rows of a cache, of which there may be fewer in memory."""
    return cache, min(cache.bytes, float(rows * cache.shape[-1] * cache.item_bytes))


@formula("nearpeak.append_", "nearpeak.append_with_query_")
def append_to_cache(op: Op) -> Cost:
    """Reads what is new and writes it to the caches; the query is read and written too.

    Sequences may be equally long: then one row of angles for each new token is read. Two products and a sum for each
    number that is rotated.
    """
    key, value, rotary_dim = op.tensor("key"), op.tensor("value"), op.arguments["rotary_dim"]
    query = op.tensors("query")
    batch, key_heads, new, _ = key.shape
    tables = op.tensors("cosines", "sines") if batch * new else ()
    rotated = [replace(x, shape=(*x.shape[:-1], rotary_dim)) for x in (key, *query)] if tables else []
    angles = [(table, float(new * rotary_dim // 2 * table.item_bytes)) for table in tables]
    rows = batch * key_heads * new
    return Cost(
        family="indexing",
        reads=accesses(key, value, *query, op.tensor("lengths"), *angles),
        writes=accesses(
            _cache_rows(op.tensor("key_cache"), rows), _cache_rows(op.tensor("value_cache"), rows), *op.outputs
        ),
        vector_flops=total(arithmetic((x,), (), 3 * distinct(x)) for x in rotated),
    )


def _linear_attention_cost(
    op: Op, reads: tuple[Tensor, ...], by_states: float, by_pairs: float, other_flops: float
) -> Cost:
    """`by_states` counts products of both sizes of a head, `by_pairs` operations for each pair of tokens."""
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    batches, heads, queries, dim = query.shape
    keys = key.shape[2]
    pairs = queries * (queries + 1) // 2 if op.arguments["causal"] else queries * keys
    flops = min(2.0 * dim * value.shape[3] * by_states, batches * heads * pairs * by_pairs)
    return product_cost("attention", query.dtype, reads, op.outputs, flops=flops, other_flops=other_flops)


def _head_tokens(x: Tensor) -> float:
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
    other_flops = float(query.elements + key.elements + op.outputs[0].elements)
    by_pairs = 2.0 * (query.shape[3] + value.shape[3])
    return _linear_attention_cost(
        op, (query, key, value), _head_tokens(query) + _head_tokens(key), by_pairs, other_flops
    )


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
    by_states = (_head_tokens(query) + _head_tokens(key)) * for_query
    by_states += _head_tokens(query) * (for_key or for_value) + _head_tokens(key) * (for_key + for_value)
    by_pairs = 2.0 * (value_dim * weights + dim * (for_query + for_key) + (dim + value_dim) * for_value)
    other_flops = float(query.elements * (1 + for_query) + key.elements * (1 + for_key))
    other_flops += 2.0 * op.tensor("gradient").elements * weights
    return _linear_attention_cost(op, reads, by_states, by_pairs, other_flops)
