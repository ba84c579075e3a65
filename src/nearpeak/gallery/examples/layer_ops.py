"""The ops of a transformer layer: who computes, who moves bytes, and what fusing them saves.

A layer is a handful of operations: products, attention, LayerNorm, softmax, dropout, residual adds. Nearly all of its
arithmetic is in products and attention, and yet the others count, because each of them carries every number through
memory. This counts operations and bytes of each, says what limits it, and what remains when
neighbors run as one kernel and what one hands to the next never reaches memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

import nearpeak
from nearpeak.gallery.parts import Part, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import percent, quantity, seconds, significant

DROPPED = 0.1
Call = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Each row to mean 0 and deviation 1, then scaled."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def dropout(x: torch.Tensor) -> torch.Tensor:
    """Some numbers to 0, at random."""
    return functional.dropout(x, DROPPED)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Each row to positive numbers with the sum 1."""
    return torch.softmax(scores, -1)


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as the formula has it: scores, softmax, weighted sum."""
    return softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5) @ v


def block_end(
    y: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """Product, dropout, residual add, LayerNorm."""
    return norm(x + dropout(functional.linear(y, weight)), scale, shift)


def example(context: Context) -> Iterator[Part]:
    """Each op alone, then two chains of them."""
    batch, heads, tokens, width = context.pick(gpu=(4, 16, 2048, 128), cpu=(2, 4, 256, 64))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    hidden = heads * width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=context.tensors)

    x, other = draw(batch * tokens, hidden), draw(batch * tokens, hidden)
    up, down = draw(4 * hidden, hidden), draw(hidden, 4 * hidden)
    q, k, v = (draw(batch, heads, tokens, width) for _ in range(3))
    scale, shift = draw(hidden), draw(hidden)
    calls: dict[str, Call] = {
        "product": (functional.linear, (x, up)),
        "attention": (functional.scaled_dot_product_attention, (q, k, v)),
        "LayerNorm": (norm, (x, scale, shift)),
        "softmax": (softmax, (draw(batch, heads, tokens, tokens),)),
        "dropout": (dropout, (x,)),
        "residual add": (torch.add, (x, other)),
    }
    yield from prose(
        f"{batch} sequences of {tokens} tokens, {heads} heads of {width}: rows of {hidden} numbers. The product takes"
        f" each row to {4 * hidden} numbers; softmax is that of the scores of attention, {batch} x {heads} x {tokens} x"
        f" {tokens}."
    )
    estimates = {name: context.estimate(fn, *args) for name, (fn, args) in calls.items()}
    yield _table(estimates)
    yield from _limits(estimates)
    yield prediction_table(
        "Each op alone",
        [context.row(name, fn, *args, predicted=_predicted(estimates[name])) for name, (fn, args) in calls.items()],
        note="Predicted: the bound times what kernels of this kind and size were seen to take.",
    )
    yield from _fused(
        context,
        {
            "written out": (written_out, (q, k, v)),
            "block end": (block_end, (draw(batch * tokens, 4 * hidden), down, x, scale, shift)),
        },
        estimates["attention"],
    )


def _table(estimates: dict[str, nearpeak.Estimate]) -> Table:
    return Table(
        title="Counted",
        headers=("", "FLOP", "bytes", "FLOP/B", "bound", "limit"),
        align="lrrrrl",
        rows=tuple(
            (
                name,
                quantity(estimate.flops, ""),
                quantity(estimate.bytes, "B"),
                significant(estimate.flops / estimate.bytes),
                seconds(estimate.as_written_s),
                _limit(estimate),
            )
            for name, estimate in estimates.items()
        ),
        note="What the op before left in the last-level cache, and what stays there when it ends, crosses no memory: a"
        " bound may be less than the bytes take through memory.",
    )


def _limit(estimate: nearpeak.Estimate) -> str:
    """Of the longest op."""
    return max(estimate.ops, key=lambda op: op.seconds).limiter


def _limits(estimates: dict[str, nearpeak.Estimate]) -> Iterator[Part]:
    computing = [name for name, estimate in estimates.items() if _limit(estimate) == "compute"]
    rest = [estimate for name, estimate in estimates.items() if name not in computing]
    flops = sum(estimate.flops for estimate in rest) / sum(estimate.flops for estimate in estimates.values())
    times = [(_predicted(estimate), _limit(estimate) == "compute") for estimate in estimates.values()]
    share = sum(time for time, computes in times if not computes) / sum(time for time, _ in times)
    named = " and ".join(computing) or "none"
    yield from prose(
        f"Limited by compute: {named}. The others do {percent(flops, 2)} of the operations of this table, and are to"
        f" take {percent(share, 0)} of its time."
    )


def _predicted(estimate: nearpeak.Estimate) -> float:
    return estimate.as_written_s if estimate.expected_device_s is None else estimate.expected_device_s


def _fused(context: Context, chains: dict[str, Call], attention: nearpeak.Estimate) -> Iterator[Part]:
    """What chains of ops take as written, and as few kernels."""
    estimates = {name: context.estimate(fn, *args) for name, (fn, args) in chains.items()}
    yield from prose(
        "Two chains of ops. Attention written out: scores, softmax, weighted sum. The end of a block: product, dropout,"
        " residual add, LayerNorm. As written, each op reads what the one before wrote. Fused, what need not be"
        " written is not."
    )
    yield StackedBars(
        title="Where the time of a chain goes",
        subtitle="Expected as written: the bound if fused, what fusion would save, and what kernels lose to the bound",
        bars=tuple(
            Bar(
                name=name,
                pieces=(
                    ("fused bound", one.fused_s),
                    ("fusion", one.as_written_s - one.fused_s),
                    ("slow kernels", max(0.0, _predicted(one) - one.as_written_s)),
                ),
            )
            for name, one in estimates.items()
        ),
    )
    rows = [context.row(name, fn, *args, predicted=_predicted(estimates[name])) for name, (fn, args) in chains.items()]
    yield prediction_table("The chains as written", rows)
    written, end = estimates["written out"], estimates["block end"]
    fused = _predicted(attention)
    yield from prose(
        f"Written out, attention moves {quantity(written.bytes, 'B')}; as one op {quantity(attention.bytes, 'B')},"
        f" since the scores stay on the chip. Its bound falls from {seconds(written.as_written_s)} to"
        f" {seconds(written.fused_s)}, and what is expected from {seconds(_predicted(written))} to {seconds(fused)}."
        f" At the end of a block fusion can save {seconds(end.as_written_s - end.fused_s)} of the bound of"
        f" {seconds(end.as_written_s)}: {_why(end)}"
    )


def _why(estimate: nearpeak.Estimate) -> str:
    product = max(op.seconds for op in estimate.ops if op.family == "matrix")
    share = product / estimate.as_written_s
    if share > 0.8:
        return f"the product is {percent(share, 0)} of it, and no fusion makes a product shorter."
    return f"the product is {percent(share, 0)} of it, and the rest could happen while its result is still on the chip."
