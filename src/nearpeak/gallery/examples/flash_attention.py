"""Why FlashAttention: the same products, without the scores in memory.

Attention written out as its formula reads puts a score for each query and key into memory, and every step after that
reads and writes all of them. A fused kernel does the same products, keeps a block of scores on the chip, and needs only
a running maximum and a running sum to do so. Shown are the traffic of both, why the running result is exact in the end,
and what the three versions of FlashAttention changed about the loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak import kernels
from nearpeak.bound.estimate import EstimatedOp
from nearpeak.gallery.parts import Drawing, Part, Plot, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.render.picture.scene import Polygon, Scene, Shape, Text
from nearpeak.render.picture.svg import svg
from nearpeak.units import quantity, seconds

STEPS = {
    "aten.clone": "repeat for all heads",
    "aten.bmm": "product",
    "aten._to_copy": "cast",
    "aten.mul": "scale",
    "aten._softmax": "softmax",
}
EXPONENTIALS = 16
"""By a multiprocessor in a clock: CUDA C++ Programming Guide, arithmetic instructions, for capabilities 8.0 to 10.0."""
BLOCK = 128
"""Queries or keys of a block, for the traffic of the loops."""


def example(context: Context) -> Iterator[Part]:
    """Written out, fused, exact in the end, and the loops."""
    heads, key_heads, tokens, dim = context.pick(gpu=(64, 4, 4096, 128), cpu=(8, 2, 1024, 64))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    query = torch.randn(1, heads, tokens, dim, dtype=dtype, device=context.tensors)
    key, value = (torch.randn(1, key_heads, tokens, dim, dtype=dtype, device=context.tensors) for _ in range(2))
    estimate = context.estimate(written_out, query, key, value)
    scores = heads * tokens * tokens * 4
    yield from prose(
        f"{heads} heads of queries and {key_heads} of keys, each of {dim}, over {tokens} tokens: a score for each head,"
        f" query and key is {quantity(scores, 'B')} in float32, where query, key, value and result together are"
        f" {quantity((2 * heads + 2 * key_heads) * tokens * dim * dtype.itemsize, 'B')}."
    )
    rows = [
        (
            STEPS.get(op.name.rpartition(".")[0], op.name),
            quantity(op.bytes_read, "B"),
            quantity(op.bytes_written, "B"),
            seconds(op.seconds),
            seconds(expected(op)),
        )
        for op in estimate.ops
        if op.seconds > 0
    ]
    out = sum(expected(op) for op in estimate.ops)
    total = ("all steps", quantity(estimate.work.bytes_read, "B"), quantity(estimate.work.bytes_written, "B"))
    yield Table(
        title="Written out, step by step",
        headers=("", "reads", "writes", "at least", "expected"),
        rows=(*rows, (*total, seconds(estimate.as_written_s), seconds(out))),
        totals=1,
        note="At least: the bytes at the machine's bandwidth or the operations at its peak, whichever takes longer."
        " Expected: what torch's kernels for such a step were measured to take on a machine of this kind."
        + (
            " Casts up write more than they read, and torch's kernel for them is slower than the one for casts down; a"
            " softmax takes longer than its bytes, for its numbers, and so as long in 32 bits as in 16."
            if context.gpu
            else ""
        ),
    )
    products = 4 * heads * tokens * tokens * dim
    yield from prose(
        f"All steps together move {quantity(estimate.bytes, 'B')}, {estimate.bytes / scores:.1f} times the scores. The"
        f" two products, {quantity(products, 'FLOP')}, need {seconds(estimate.ideal_s)} if nothing waits for memory:"
        f" {estimate.ideal_s / estimate.as_written_s:.0%} of what the steps take at least."
    )
    fused = context.predict(by_torch, query, key, value)
    one = context.row("written out", written_out, query, key, value, predicted=out)
    ways = [one, context.row("fused, torch", by_torch, query, key, value, predicted=fused)]
    if context.gpu:
        ways.append(context.row("fused, nearpeak.kernels", kernels.attention, query, key, value, predicted=fused))
    yield prediction_table("Written out and fused", ways, note=_note(context))
    last = ways[-1]
    before, after = (one.measured, last.measured) if one.measured and last.measured else (one.predicted, fused)
    assert before is not None
    how = "measured" if one.measured else "predicted"
    yield from prose(f"The fused form takes {after / before:.0%} of the time of the one written out, as {how} here.")

    yield from online()
    yield from loops(context, heads, key_heads, tokens, dim, dtype.itemsize)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As the formula reads, with scores in float32."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.mT).float() * (1 / math.sqrt(query.shape[-1]))
    return torch.softmax(scores, -1).to(value.dtype) @ value


def expected(op: EstimatedOp) -> float:
    """What a step is expected to take; its bound where nothing like it was measured."""
    return op.seconds if op.expected_seconds is None else op.expected_seconds


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The fused form that torch has."""
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def _note(context: Context) -> str:
    if context.gpu:
        return "Both fused forms are predicted as what torch's own is expected to take."
    return (
        "The fused form is predicted as what torch's own is expected to take. Fusing saves bytes, and no exponential:"
        " on a CPU a softmax takes longer than its bytes, for its exponentials."
    )


def online() -> Iterator[Part]:
    """The running result after each block of keys, against the exact one; small, and always on the CPU."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(size, 64, generator=generator, dtype=torch.float64) for size in (32, 1024, 1024))
    exact = torch.softmax(query @ key.T / 8, -1) @ value
    top, total, result = torch.full((32, 1), -math.inf).double(), torch.zeros(32, 1).double(), torch.zeros(32, 64)
    digits: dict[str, list[tuple[float, float]]] = {"against all keys": [], "against the keys seen so far": []}
    for number, (keys, values) in enumerate(zip(key.split(64), value.split(64), strict=True), 1):
        scores = query @ keys.T / 8
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink, weights = (top - higher).exp(), (scores - higher).exp()  # what came before is scaled to the new maximum
        total = total * shrink + weights.sum(-1, keepdim=True)
        result = result * shrink + weights @ values
        top = higher
        so_far = torch.softmax(query @ key[: 64 * number].T / 8, -1) @ value[: 64 * number]
        for points, right in zip(digits.values(), (exact, so_far), strict=True):
            error = ((result / total - right).abs().max() / right.abs().max()).item()
            points.append((float(number), max(0.0, -math.log10(max(error, 1e-16)))))
    last, before = (digits["against all keys"][place][1] for place in (-1, -2))
    yield from prose(
        "How a softmax is computed without all of its scores: the maximum, the sum and the result so far are kept, and"
        " scaled down whenever a higher maximum comes. After each block the running result is the exact attention over"
        f" the keys seen so far. Below, {len(key) // 64} blocks of 64 keys in float64: against all keys {before:.1f}"
        f" decimal digits are right before the last block and {last:.1f} after it; against the keys seen so far never"
        f" fewer than {min(right for _, right in digits['against the keys seen so far']):.1f}."
    )
    yield Plot(
        title="The running result, block by block",
        series=tuple(Series(name=name, points=tuple(points)) for name, points in digits.items()),
        x_label="blocks of keys seen",
        y_label="right digits",
        y_unit="",
    )


def loops(context: Context, heads: int, key_heads: int, tokens: int, dim: int, item: int) -> Iterator[Part]:
    """What each version asks memory for, and the overlap of the third."""
    head, blocks = tokens * dim * item, tokens // BLOCK
    first = heads * (2 * head + blocks * 3 * head)
    second = heads * (2 * head + blocks * 2 * head)
    yield Table(
        title="FlashAttention 1, 2 and 3 as loops",
        headers=("", "outer loop", "inner loop", "overlap", "asked for"),
        rows=(
            ("1", "keys", "queries", "none", quantity(first, "B")),
            ("2", "queries", "keys", "none", quantity(second, "B")),
            ("3", "queries", "keys", "copies, exponentials", quantity(second, "B")),
        ),
        align="llllr",
        note=f"Asked for: from caches or memory, with blocks of {BLOCK}, by all heads, as if none shared its keys. In"
        " the first, each block of keys reads all queries and reads and writes all running results; in the others"
        " results stay in registers and are written once, and blocks of queries are independent, so that they fill"
        " a GPU also with few heads.",
    )
    ceilings = context.machine.achievable or context.machine.theoretical
    clock, processors = context.machine.clock_boost_hz, context.machine.processors
    if not context.gpu or context.machine.vendor.lower() != "nvidia" or not clock or not processors or ceilings is None:
        return
    products = 4 * heads * tokens * tokens * dim / ceilings.peak("bfloat16" if item == 2 else "float32")
    exponentials = heads * tokens * tokens / (EXPONENTIALS * processors * clock)
    yield from prose(
        f"What the third overlaps: the products take {seconds(products)} at the peak of the tensor cores, and the"
        f" exponentials {seconds(exponentials)} in the units for them. One after the other that is"
        f" {seconds(products + exponentials)}; with two groups of warps, one of which multiplies while the other takes"
        f" exponentials, {seconds(max(products, exponentials))}."
    )
    yield draw_overlap(products, exponentials)


def draw_overlap(products: float, exponentials: float) -> Drawing:
    """One after the other, and two groups in turns; widths are as the times."""
    scale = 640 / (4 * (products + exponentials))
    wide, narrow = products * scale, exponentials * scale
    period = max(wide, narrow)
    shapes: list[Shape] = [Text(x=28, y=32, text="Products and exponentials of four blocks", size=17, bold=True)]
    plans = [("in turn", [number * (wide + narrow) for number in range(4)])]
    plans += [(f"group {group + 1}", [(2 * turn + group) * period for turn in range(2)]) for group in range(2)]
    for row, (name, starts) in enumerate(plans):
        top = 56 + 44 * row
        shapes.append(Text(x=28, y=top + 19, text=name, color="muted"))
        for start in starts:
            for left, width, color, text in ((0.0, wide, "0", "products"), (wide, narrow, "1", "exp")):
                begin = 110 + start + left
                corners = ((begin, top), (begin + width, top), (begin + width, top + 28), (begin, top + 28))
                shapes.append(Polygon(points=corners, fill=color, opacity=0.8, stroke="page", title=text))
                if width > 8 * len(text):
                    shapes.append(Text(x=begin + width / 2, y=top + 18, text=text, size=11, anchor="middle", halo=True))
    described = "Products and exponentials of four blocks: in turn, and of two groups, one's below the other's."
    return Drawing(
        title="Overlap of two groups",
        described=described,
        svg=svg(Scene(width=800, height=200, described=described, shapes=tuple(shapes))),
    )
