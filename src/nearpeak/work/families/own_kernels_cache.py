"""The operators of `nearpeak.kernels` that work with a cache of keys and values: attention of new tokens, and writing.

How long sequences are is on the device, and not known here. Certain is what is new: a sequence has the tokens that are
asked for, and those that are written have their places. So the floor of an attention is that of new tokens among
themselves, wherever older ones are few; pages may be shared by all sequences.
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.attention_pairs import banded
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.families.pointwise import arithmetic, distinct, total
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


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
    per_pair = 2 * (dim + values.shape[-1])
    matrix, vector = engines(query.dtype, float(per_pair * count), tf32=False)
    products = dict(matrix or vector)
    if count:
        name = vector_dtype(query.dtype)
        vector[name] = vector.get(name, 0.0) + count
    key_heads = keys.shape[2 if paged else 1]
    rows = (1 if paged else batch) * key_heads * new if count else 0
    return Cost(
        family="attention",
        reads=accesses(query, op.tensor("lengths"), _part(keys, rows), _part(values, rows)),
        writes=accesses(*op.outputs),
        flops=matrix,
        vector_flops=vector,
        products=products,
    )


def _part(cache: Tensor, rows: int) -> tuple[Tensor, float]:
    """So many rows of a cache, of which there may be fewer in memory."""
    return cache, min(cache.bytes, float(rows * cache.shape[-1] * cache.item_bytes))


@formula("nearpeak.append_", "nearpeak.append_with_query_")
def append(op: Op) -> Cost:
    """Reads what is new and writes it to the caches; the query is read and written too.

    Sequences may be equally long: then one row of angles for each new token is read. Two products and a sum for each
    number that is rotated.
    """
    key, value, rotary_dim = op.tensor("key"), op.tensor("value"), op.arguments["rotary_dim"]
    asked = op.tensors("query")
    batch, key_heads, new, _ = key.shape
    tables = op.tensors("cosines", "sines") if batch * new else ()
    rotated = [replace(x, shape=(*x.shape[:-1], rotary_dim)) for x in (key, *asked)] if tables else []
    angles = [(table, float(new * rotary_dim // 2 * table.item_bytes)) for table in tables]
    rows = batch * key_heads * new
    return Cost(
        family="indexing",
        reads=accesses(key, value, *asked, op.tensor("lengths"), *angles),
        writes=accesses(_part(op.tensor("key_cache"), rows), _part(op.tensor("value_cache"), rows), *op.outputs),
        vector_flops=total(arithmetic((x,), (), 3 * distinct(x)) for x in rotated),
    )
