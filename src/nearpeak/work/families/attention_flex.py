"""Flex attention: higher-order operators, whose arguments have places instead of names.

Without a block mask every pair of a query and a key is computed, as in the other attentions. With one, which pairs
there are is data. Where the mask had values when the op was recorded, they were counted and are among the options for
the kernel: all pairs of blocks that are not masked, and in the other blocks those that the mask leaves. A kernel
computes whole blocks, but one with smaller blocks need not, so the pairs are the floor. Keys and queries are charged
for the head of the mask that uses the fewest.

Without values, this is certain: every query sees a key (assumed: the result has no meaning otherwise), so the queries
and one key and value for each head are read, and results and gradients are written. That is far below what a usual
mask asks for, so such an op counts as known by its operands only, not by its formula.

Operands of the user's own function that changes scores are not charged: it may not look at them. Neither is the
log-sum-exp of the forward, which inference does without.
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.work.cost import Cost, every, formula
from nearpeak.work.families.attention import HEADS_FIRST, backward, forward
from nearpeak.work.families.attention_pairs import Pairs, banded
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor

_WHOLE = 1 << 30
"""The size of a block where torch makes a block mask of its own: one that holds all pairs."""
_FORWARD = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")
_BACKWARD = (
    *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp"),
    *("fw_graph", "joint_graph", "block_mask", "scale", "kernel_options"),
)


@formula("higher_order.flex_attention")
def _flex(op: Op) -> Cost:
    op = _named(op, _FORWARD)
    pairs, known = _pairs(op)
    cost = forward(replace(op, outputs=op.outputs[:1]), HEADS_FIRST, pairs)
    return replace(cost, model="formula" if known else "operands")


@formula("higher_order.flex_attention_backward")
def _flex_backward(op: Op) -> Cost:
    """A loss that uses the log-sum-exp alone gives no gradient of the output; then only results are charged."""
    op = _named(op, _BACKWARD)
    pairs, known = _pairs(op)
    if not isinstance(op.arguments["grad_out"], Tensor):
        return Cost(family="attention", writes=every(op.outputs), model="operands")
    cost = backward(op, HEADS_FIRST, pairs)
    return replace(cost, writes=every(op.outputs), model="formula" if known else "operands")


def _named(op: Op, names: tuple[str, ...]) -> Op:
    given = {name: op.arguments.get(str(place)) for place, name in enumerate(names)}
    return replace(op, arguments={**given, **{key: value for key, value in op.arguments.items() if key in names}})


def _pairs(op: Op) -> tuple[Pairs, bool]:
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
