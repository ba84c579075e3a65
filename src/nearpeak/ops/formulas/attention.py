"""Attention: the fused operators of torch, flex attention, and whole attention layers.

Counted: products over the pairs of a query and a key that are not masked by position. The forward pass takes 2 products
(scores, values), the backward pass 5 (scores again, and the gradients of probabilities, values, queries and keys), with
2 FLOPs for each pair and element of the head, and one vector FLOP per pair for the exponential. Query, key and value
are read once through their strides (fewer key heads: fewer bytes), the output and the log-sum-exp are written. The
backward pass reads both again, as every implementation does, though they could be recomputed. Random state is a few
bytes and not counted.

Positions: `is_causal` of torch's SDPA aligns top left (query i sees keys 0 to i), that of the raw flash operators
bottom right. Queries and keys in no pair are not read. A dense mask is read once through its strides and removes no
pairs: its values are data, and these operators compute all pairs under it.

float32 follows the flag for tf32, except in the memory-efficient kernels, which split float32 into tf32 products
whatever the flag: charged as one such product.

Flex attention is a higher-order operator, whose arguments have positions instead of names. Without a block mask every
pair is computed. With one, the pairs depend on data. Where the mask had values when the op was recorded, its pairs were
counted and are among the options of the kernel: all pairs of full blocks, and the unmasked pairs of partial blocks. A
kernel computes whole blocks, but one with smaller blocks need not, so the pairs are the floor. Keys and queries are
charged for the head of the mask that uses the fewest. Without values, every query sees a key (assumed: the result has
no meaning otherwise), so the queries and one key and value per head are read, and results and gradients are written.
That is far below the work under a usual mask, so such an op counts as known by its operands only. Operands of a
function that changes scores are not charged: it may not read them. Neither is the log-sum-exp of the forward pass,
which inference does not need.

Whole layers are multi-head attention and the encoder layer of torch's fast path for inference. Counted: the products of
the projections, of attention over all pairs and of the feed-forward part, one vector FLOP per pair for the exponential;
every operand read once, the results written. Norms and activations are part of the epilogues. Nested inputs (sequences
of different lengths) have no sizes here, so only what is written is charged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nearpeak.ops.cost import Cost, Part, accesses, formula
from nearpeak.ops.formulas.matrix import product_cost
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """For one head: how many pairs, and the first and the number of the queries and keys that are in any."""

    count: int
    queries: tuple[int, int]
    keys: tuple[int, int]


def banded(queries: int, keys: int, *, left: int | None = None, right: int | None = None, offset: int = 0) -> Pairs:
    """Query i sees the keys from i + offset - left to i + offset + right; None has no limit.

    `offset` is 0 for a mask aligned top left, `keys - queries` for one aligned bottom right.

    >>> banded(4, 6, right=0), banded(4, 6, right=0, offset=2).count
    (Pairs(count=10, queries=(0, 4), keys=(0, 4)), 18)
    """
    low = -queries if left is None else offset - left  # of key - query, both ends included
    high = keys if right is None else offset + right
    first_query, last_query = max(0, -high), min(queries - 1, keys - 1 - low)
    first_key, last_key = max(0, low), min(keys - 1, queries - 1 + high)
    if last_query < first_query or last_key < first_key or high < low:
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    return Pairs(
        count=_up_to(queries, keys, high) - _up_to(queries, keys, low - 1),
        queries=(first_query, last_query - first_query + 1),
        keys=(first_key, last_key - first_key + 1),
    )


def packed(
    queries: int,
    keys: int,
    sequences: int,
    *,
    same: bool,
    left: int | None = None,
    right: int | None = None,
    aligned_right: bool = True,
) -> Pairs:
    """The least for sequences of unknown lengths, packed one after the other.

    With the same lengths for queries and keys (`same`), a sequence of n has a number of pairs that is convex in n, so
    equal lengths have the fewest. With lengths that differ, each key is in one pair at the least, where no mask
    can hide it (aligned top left, or a window) and every sequence has a query (assumed); else nothing is certain.
    """
    if not queries or not keys or not sequences:
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    if same:
        short, longer = divmod(queries, sequences)
        count = longer * banded(short + 1, short + 1, left=left, right=right).count
        count += (sequences - longer) * banded(short, short, left=left, right=right).count
        return Pairs(count=count, queries=(0, queries), keys=(0, keys))
    if left is not None or right not in (None, 0) or (right == 0 and not aligned_right):
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    return Pairs(count=keys, queries=(0, 0) if right == 0 else (0, queries), keys=(0, keys))


def _up_to(queries: int, keys: int, difference: int) -> int:
    """Pairs with key - query <= difference: the sum of clamp(query + difference + 1, 0, keys)."""
    start = difference + 1
    return _clamped_sum(start + queries, keys) - _clamped_sum(start, keys)


def _clamped_sum(stop: int, limit: int) -> int:
    """The sum of clamp(t, 0, limit) for all t < stop."""
    if stop <= 0:
        return 0
    ramp = min(stop, limit + 1)
    return ramp * (ramp - 1) // 2 + (stop - ramp) * limit


HEADS_FIRST, SEQUENCE_FIRST = -2, -3
"""The dimension of the sequence: SDPA has (batch, heads, sequence, head), the raw operators (batch, sequence, heads,
head), and without the batch where sequences are packed."""


def forward(op: Op, axis: int, pairs: Pairs, *, mask: str = "", tf32: bool | None = None) -> Cost:
    """Reads the queries, keys and values of `pairs`, writes the output and the log-sum-exp: two products."""
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    heads = _heads(query, key, value, axis)
    reads: list[Part] = [
        _part(query, axis, pairs.queries),
        _part(key, axis, pairs.keys),
        _part(value, axis, pairs.keys),
        *_mask(op, mask, axis, pairs),
        *(tensor for name in ("q_descale", "k_descale", "v_descale") for tensor in op.tensors(name)),
    ]
    changed = [tensor for name in op.mutated for tensor in op.tensors(name)]
    writes: list[Part] = [*(changed or op.outputs[:1])]
    for statistics in op.outputs[:1] if changed else op.outputs[1:2]:
        if op.arguments.get("compute_log_sumexp", True):  # some kernels pad it
            writes.append((statistics, min(statistics.bytes, heads * query.shape[axis] * statistics.item_bytes)))
    return _pairs_cost(op, reads, writes, 2 * (query.shape[-1] + value.shape[-1]), heads * pairs.count, tf32)


def backward(
    op: Op,
    axis: int,
    pairs: Pairs,
    *,
    mask: str = "",
    wanted: Sequence[bool] = (True, True, True, False),
    tf32: bool | None = None,
) -> Cost:
    """Up to five products, and the gradients that are `wanted`: of query, key, value and mask.

    Without the first two and the last there are no scores to differentiate: only the product for the values remains.
    """
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    grad = op.tensor("grad_out_" if "grad_out_" in op.arguments else "grad_out")
    for_query, for_key, for_value, for_mask = wanted
    scores = for_query or for_key or for_mask
    width = query.shape[-1] * (1 + for_query + for_key) + value.shape[-1] * (scores + for_value)
    if not any(wanted):
        return Cost(family="attention")
    heads = _heads(query, key, value, axis)
    statistics = op.tensor("logsumexp")
    rows = heads * pairs.queries[1]
    reads: list[Part] = [
        _part(query, axis, pairs.queries),
        _part(key, axis, pairs.keys),
        _part(grad, axis, pairs.queries),
        (statistics, min(statistics.bytes, rows * statistics.item_bytes)),
        *_mask(op, mask, axis, pairs),
    ]
    if scores:
        reads += [_part(value, axis, pairs.keys), _part(op.tensor("out"), axis, pairs.queries)]
    outputs = op.outputs  # kernels return gradients that are not requested
    if len(outputs) >= 3:
        outputs = tuple(output for output, is_wanted in zip(outputs, wanted, strict=False) if is_wanted)
    return _pairs_cost(op, reads, outputs, 2 * width, heads * pairs.count, tf32)


def _heads(query: Tensor, key: Tensor, value: Tensor, axis: int) -> int:
    """Batch times heads of queries; a batch of one is broadcast, fewer key heads are shared."""
    total = 1
    for dimension in range(-max(len(tensor.shape) for tensor in (query, key, value)), -1):
        if dimension != axis:
            sizes = [tensor.shape[dimension] for tensor in (query, key, value) if len(tensor.shape) >= -dimension]
            total *= 0 if 0 in sizes else max(sizes)
    return total


def _part(tensor: Tensor, axis: int, positions: tuple[int, int]) -> Tensor:
    """The positions of a sequence that are used: a first one and how many."""
    first, count = positions
    if count == tensor.shape[axis]:
        return tensor
    shape, dimension = list(tensor.shape), axis % len(tensor.shape)
    shape[dimension] = count
    return replace(tensor, shape=tuple(shape), offset=tensor.offset + first * tensor.strides[dimension])


def _mask(op: Op, argument: str, axis: int, pairs: Pairs) -> list[tuple[Tensor, float]]:
    """The part of a dense mask that belongs to pairs which are computed."""
    total = op.tensor("query").shape[axis] * op.tensor("key").shape[axis]
    return [(mask, mask.bytes * pairs.count / total) for mask in op.tensors(argument) if total]


def _pairs_cost(
    op: Op, reads: Sequence[Part], writes: Sequence[Part], flops_per_pair: int, pairs: int, tf32: bool | None
) -> Cost:
    """Products over pairs, and one exponential per pair."""
    return product_cost(
        "attention",
        op.tensor("query").dtype,
        reads,
        writes,
        flops=float(flops_per_pair * pairs),
        other_flops=pairs,
        tf32=op.tf32_products if tf32 is None else tf32,
    )


def _sdpa_pairs(op: Op) -> Pairs:
    queries, keys = op.tensor("query").shape[HEADS_FIRST], op.tensor("key").shape[HEADS_FIRST]
    return banded(queries, keys, right=0 if op.arguments.get("is_causal") else None)


@formula(
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
def _sdpa(op: Op) -> Cost:
    mask = "attn_mask" if "attn_mask" in op.arguments else "attn_bias"
    return forward(op, HEADS_FIRST, _sdpa_pairs(op), mask=mask)


@formula("aten._scaled_dot_product_efficient_attention")
def _sdpa_efficient(op: Op) -> Cost:
    return forward(op, HEADS_FIRST, _sdpa_pairs(op), mask="attn_bias", tf32=True)


@formula("aten.scaled_dot_product_attention", "aten._scaled_dot_product_attention_math")
def _sdpa_whole(op: Op) -> Cost:
    """Not yet lowered to a kernel: no log-sum-exp; what it returns, probabilities perhaps, is written."""
    cost = forward(op, HEADS_FIRST, _sdpa_pairs(op), mask="attn_mask")
    return replace(cost, writes=accesses(*op.written))


@formula(
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
)
def _sdpa_backward(op: Op) -> Cost:
    mask = "attn_mask" if "attn_mask" in op.arguments else "attn_bias"
    return backward(op, HEADS_FIRST, _sdpa_pairs(op), mask=mask)


@formula("aten._scaled_dot_product_fused_attention_overrideable_backward")
def _sdpa_overrideable_backward(op: Op) -> Cost:
    return backward(op, HEADS_FIRST, _sdpa_pairs(op), mask="attn_bias", wanted=op.arguments["grad_input_mask"])


@formula("aten._scaled_dot_product_efficient_attention_backward")
def _sdpa_efficient_backward(op: Op) -> Cost:
    wanted = op.arguments["grad_input_mask"]
    return backward(op, HEADS_FIRST, _sdpa_pairs(op), mask="attn_bias", wanted=wanted, tf32=True)


@formula(
    "aten._flash_attention_forward",
    "aten._flash_attention_forward_no_dropout_inplace",
)
def _flash(op: Op) -> Cost:
    return forward(op, SEQUENCE_FIRST, _flash_pairs(op))


@formula("aten._flash_attention_backward")
def _flash_backward(op: Op) -> Cost:
    return backward(op, SEQUENCE_FIRST, _flash_pairs(op))


def _flash_pairs(op: Op) -> Pairs:
    """A negative window has no limit. How much of a paged or partly filled cache is used is data: none is charged."""
    left, right = (_limit(op.arguments.get(f"window_size_{side}")) for side in ("left", "right"))
    if op.arguments.get("is_causal"):
        right = 0
    return _raw_pairs(op, "cum_seq_q", "cum_seq_k", ("seqused_k", "block_table"), left, right, aligned_right=True)


def _limit(window: int | None) -> int | None:
    return None if window is None or window < 0 else window


@formula("aten._cudnn_attention_forward")
def _cudnn(op: Op) -> Cost:
    return forward(op, *_cudnn_pairs(op), mask="attn_bias")


@formula("aten._cudnn_attention_backward")
def _cudnn_backward(op: Op) -> Cost:
    return backward(op, *_cudnn_pairs(op), mask="attn_bias")


def _cudnn_pairs(op: Op) -> tuple[int, Pairs]:
    """Heads go first as in SDPA, and the sequence where sequences are packed. A causal mask aligns top left."""
    if len(op.tensor("query").shape) == 4:
        return HEADS_FIRST, _sdpa_pairs(op)
    right = 0 if op.arguments.get("is_causal") else None
    return SEQUENCE_FIRST, _raw_pairs(op, "cum_seq_q", "cum_seq_k", (), None, right, aligned_right=False)


@formula("aten._efficient_attention_forward")
def _efficient(op: Op) -> Cost:
    return forward(op, SEQUENCE_FIRST, _efficient_pairs(op), mask="bias", tf32=True)


@formula("aten._efficient_attention_backward")
def _efficient_backward(op: Op) -> Cost:
    wanted = (True, True, True, bool(op.arguments["bias_requires_grad"]))
    return backward(op, SEQUENCE_FIRST, _efficient_pairs(op), mask="bias", wanted=wanted, tf32=True)


def _efficient_pairs(op: Op) -> Pairs:
    """`custom_mask_type`: 0 none, 1 causal from the top left, 2 from the bottom right; a window of n is n keys."""
    kind, window = op.arguments["custom_mask_type"], op.arguments.get("window_size")
    left = window - 1 if kind and window is not None and window > 0 else None
    right = 0 if kind else None
    return _raw_pairs(op, "cu_seqlens_q", "cu_seqlens_k", ("seqlen_k",), left, right, aligned_right=kind == 2)


def _raw_pairs(
    op: Op, ends: str, key_ends: str, fill: tuple[str, ...], left: int | None, right: int | None, *, aligned_right: bool
) -> Pairs:
    queries, keys = op.tensor("query").shape[SEQUENCE_FIRST], op.tensor("key").shape[SEQUENCE_FIRST]
    if any(op.arguments.get(name) is not None for name in fill):
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    cuts = op.arguments.get(ends)
    if isinstance(cuts, Tensor):
        same = cuts == op.arguments.get(key_ends)
        return packed(queries, keys, cuts.elements - 1, same=same, left=left, right=right, aligned_right=aligned_right)
    return banded(queries, keys, left=left, right=right, offset=keys - queries if aligned_right else 0)


_WHOLE = 1 << 30
"""The size of a block where torch makes a block mask of its own: one that holds all pairs."""
_FORWARD = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")
_BACKWARD = (
    *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp"),
    *("fw_graph", "joint_graph", "block_mask", "scale", "kernel_options"),
)


@formula("higher_order.flex_attention")
def _flex(op: Op) -> Cost:
    op = _by_name(op, _FORWARD)
    pairs, known = _flex_pairs(op)
    cost = forward(replace(op, outputs=op.outputs[:1]), HEADS_FIRST, pairs)
    return replace(cost, model="formula" if known else "operands")


@formula("higher_order.flex_attention_backward")
def _flex_backward(op: Op) -> Cost:
    """A loss that uses the log-sum-exp alone gives no gradient of the output; then only results are charged."""
    op = _by_name(op, _BACKWARD)
    pairs, known = _flex_pairs(op)
    if not isinstance(op.arguments["grad_out"], Tensor):
        return Cost(family="attention", writes=accesses(*op.outputs), model="operands")
    cost = backward(op, HEADS_FIRST, pairs)
    return replace(cost, writes=accesses(*op.outputs), model="formula" if known else "operands")


def _by_name(op: Op, names: tuple[str, ...]) -> Op:
    positional = {name: op.arguments.get(str(place)) for place, name in enumerate(names)}
    return replace(op, arguments={**positional, **{key: value for key, value in op.arguments.items() if key in names}})


def _flex_pairs(op: Op) -> tuple[Pairs, bool]:
    """The pairs that are certain, and whether they are all."""
    queries, keys = op.tensor("query").shape[HEADS_FIRST], op.tensor("key").shape[HEADS_FIRST]
    mask = op.arguments.get("block_mask")
    if not isinstance(mask, tuple) or tuple(mask[-3:-1]) == (_WHOLE, _WHOLE):
        return banded(queries, keys), True
    options = op.arguments.get("kernel_options")
    counts = dict(options) if isinstance(options, tuple) else {}
    if "mask_pairs" in counts:
        return Pairs(
            count=counts["mask_pairs"] // counts["mask_heads"],
            queries=(0, min(counts["mask_queries"], queries)),
            keys=(0, min(counts["mask_keys"], keys)),
        ), True
    return Pairs(count=queries if keys else 0, queries=(0, queries), keys=(0, min(1, keys))), False


@formula("aten._native_multi_head_attention")
def _multi_head_attention(op: Op) -> Cost:
    """Projections in (three parts of one matrix) and out. The probabilities are written where they are asked for."""
    query, key = op.tensor("query"), op.tensor("key")
    if len(query.shape) != 3:
        return Cost(family="attention", writes=accesses(*op.outputs), model="operands")
    width = query.shape[-1]
    projections = 2.0 * width * width * (2 * query.elements + 2 * key.elements) / width if width else 0.0
    pairs = query.shape[0] * query.shape[1] * key.shape[1]
    wanted = op.outputs if op.arguments.get("need_weights", True) else op.outputs[:1]
    return _layer_cost(op, projections, pairs, wanted_results=len(wanted))


@formula("aten._transformer_encoder_layer_fwd")
def _encoder_layer(op: Op) -> Cost:
    """Four products of the width and two of the feed-forward part for each token."""
    source, wide = op.tensor("src"), op.tensor("ffn_weight_1")
    if len(source.shape) != 3:
        return Cost(family="attention", writes=accesses(*op.outputs), model="operands")
    batch, length, width = source.shape
    products = 2.0 * batch * length * (4 * width * width + 2 * wide.elements)
    return _layer_cost(op, products, batch * length * length, wanted_results=1)


def _layer_cost(op: Op, products: float, pairs: int, *, wanted_results: int) -> Cost:
    heads, width = op.arguments["num_head" if "num_head" in op.arguments else "num_heads"], op.arguments["embed_dim"]
    return product_cost(
        "attention",
        op.inputs[0].dtype,
        op.inputs,
        op.outputs[:wanted_results],
        flops=products + 4.0 * pairs * width,
        other_flops=pairs * heads,
        tf32=op.tf32_products,
    )
