"""FlashAttention in sixty lines of Triton.

The kernel that made long contexts affordable is short. A program has a block of queries, walks over the keys a block at
a time, and keeps three things: the running maximum and the running sum of each row, and the running result. What it
never has is the matrix of scores. The source is shown in the order in which it runs, and it is run as shown: on a GPU
beside torch's kernel, and without one in Triton's interpreter, which executes the same lines in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak import kernels
from nearpeak.gallery import native
from nearpeak.gallery.parts import Part, StackedBars, prediction_table, prose
from nearpeak.gallery.run import FLOOR, Context
from nearpeak.render.document import CodeBlock, Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import quantity, significant

HEAD = """
import torch
import triton
import triton.language as tl


@triton.jit
def attention_kernel(query, key, value, result, tokens, scale,
                     CAUSAL: tl.constexpr, ROWS: tl.constexpr,
                     COLUMNS: tl.constexpr, DIM: tl.constexpr):
    # One program per block of queries and head. All tensors are
    # contiguous: (batch * heads, tokens, DIM).
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1).to(tl.int64) * tokens * DIM
    row = first + tl.arange(0, ROWS)                       # (ROWS,)
    column = tl.arange(0, COLUMNS)                         # (COLUMNS,)
    dim = tl.arange(0, DIM)                                # (DIM,)
    here = head + row[:, None] * DIM + dim[None, :]        # (ROWS, DIM)
    q = tl.load(query + here, mask=row[:, None] < tokens, other=0.0)
"""
STATE = """
    # What is kept from block to block, in registers.
    top = tl.full([ROWS], -float("inf"), tl.float32)       # maximum
    total = tl.zeros([ROWS], tl.float32)                   # sum
    sums = tl.zeros([ROWS, DIM], tl.float32)               # result
    # log2(e) in the scale: the hardware has an exponential of base 2.
    scale = scale * 1.44269504
    last = tokens
    if CAUSAL:  # keys after the last query of the block count nothing
        last = tl.minimum(tokens, first + ROWS)
"""
LOOP = """
    for start in range(0, last, COLUMNS):
        at = start + column                                # (COLUMNS,)
        there = head + at[:, None] * DIM + dim[None, :]    # (COLUMNS, DIM)
        k = tl.load(key + there, mask=at[:, None] < tokens, other=0.0)
        v = tl.load(value + there, mask=at[:, None] < tokens, other=0.0)
        # Scores of this block alone: they never leave the chip.
        scores = tl.dot(q, tl.trans(k)) * scale            # (ROWS, COLUMNS)
        seen = at[None, :] < tokens
        if CAUSAL:
            seen = seen & (row[:, None] >= at[None, :])
        scores = tl.where(seen, scores, -float("inf"))
        # A higher maximum scales down what was summed before.
        higher = tl.maximum(top, tl.max(scores, 1))        # (ROWS,)
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])        # (ROWS, COLUMNS)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None])
        top = higher
"""
END = """
    out = (sums / total[:, None]).to(result.dtype.element_ty)
    tl.store(result + here, out, mask=row[:, None] < tokens)


def attention(query, key, value, causal=False, rows=128, columns=64):
    batch, heads, tokens, dim = query.shape
    result = torch.empty_like(query)
    grid = (triton.cdiv(tokens, rows), batch * heads)
    attention_kernel[grid](
        query, key, value, result, tokens, dim**-0.5, CAUSAL=causal,
        ROWS=rows, COLUMNS=columns, DIM=dim, num_warps=8, num_stages=3,
    )
    return result
"""
SOURCE = HEAD + STATE.removeprefix("\n") + LOOP.removeprefix("\n") + END.removeprefix("\n")
CHECK = """

torch.manual_seed(0)
inputs = [torch.randn(1, 2, 75, 32) for _ in range(3)]
right = torch.nn.functional.scaled_dot_product_attention(*(one.double() for one in inputs), is_causal=True)
print((attention(*inputs, causal=True, rows=32, columns=16) - right).abs().max().item())
"""
"""The lines against float64, on a size that is no multiple of a block."""
ROWS, COLUMNS = 128, 64


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's fused attention, causal."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def example(context: Context) -> Iterator[Part]:
    """The source, where its bytes are, whether it is right, and what it takes."""
    lines = sum(bool(line.strip()) and not line.strip().startswith("#") for line in SOURCE.splitlines())
    yield from prose(f"{lines} lines, without comments. First: which block is ours, and its queries.")
    yield CodeBlock(text=HEAD.strip())
    yield from prose("What is kept: two numbers per row, and the result so far.")
    yield CodeBlock(text=STATE.strip("\n"))
    yield from prose(
        "The loop over keys. A softmax needs the maximum and the sum of a whole row; both are corrected as blocks come."
        " `shrink` is 1 for rows whose maximum did not change."
    )
    yield CodeBlock(text=LOOP.strip("\n"))
    yield from prose("The division by the sum comes once, at the end. Then the function that starts the programs:")
    yield CodeBlock(text=END.strip("\n"))

    batch, heads, tokens, dim = context.pick(gpu=(4, 16, 4096, 128), cpu=(2, 4, 512, 64))
    yield from _on_chip(context, tokens, dim, heads * batch)
    yield from _exact(context)

    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    shape = (batch, heads, tokens, dim)
    query, key, value = (torch.randn(shape, dtype=dtype, device=context.tensors) for _ in range(3))
    expected = context.predict(by_torch, query, key, value)
    fast = context.row("torch's kernel", by_torch, query, key, value, predicted=expected)
    rows = [fast]
    if context.gpu:
        ours: Callable[..., Tensor] = by_torch
        if context.measures:
            shown = native.load_triton(SOURCE)["attention"]
            ours = lambda q, k, v: shown(q, k, v, causal=True)  # noqa: E731
        rows.append(context.row("these lines", ours, query, key, value, predicted=expected, band=FLOOR))
        rows.append(
            context.row(
                "nearpeak's kernel",
                lambda q, k, v: kernels.attention(q, k, v, causal=True),
                query,
                key,
                value,
                predicted=expected,
                band=(0.6, 1.25),
            )
        )
    yield prediction_table(
        f"Causal attention: {batch} x {heads} heads of {dim}, {tokens} tokens",
        rows,
        note="Predicted: what torch's kernel is expected to take. For these lines that is the least: they leave out"
        " what fast kernels add, such as copies by a unit of their own and two groups of warps in turns; nearpeak's"
        " may be faster than torch's."
        if context.gpu
        else "",
    )
    if len(rows) > 1 and rows[1].measured and fast.measured:
        flops = 2 * batch * heads * tokens * tokens * dim
        yield from prose(
            f"Sixty lines take {significant(rows[1].measured / fast.measured)} times as long as torch's kernel,"
            f" {quantity(flops / rows[1].measured, 'FLOP/s')}."
        )
    if len(rows) > 1:
        yield StackedBars(
            title="Time of one call",
            subtitle=f"as {'measured' if context.measures else 'predicted'} here",
            bars=tuple(Bar(name=row.what, pieces=(("seconds", row.measured or row.predicted or 0.0),)) for row in rows),
        )


def _on_chip(context: Context, tokens: int, dim: int, heads: int) -> Iterator[Part]:
    """What a program holds, beside what the formula would put into memory."""
    item = 2
    parts = {
        "queries, in registers or shared memory": ROWS * dim * item,
        "keys and values, in shared memory, three blocks ahead": 3 * 2 * COLUMNS * dim * item,
        "scores and weights, in registers": ROWS * COLUMNS * 4,
        "running result, maximum and sum, in registers": ROWS * (dim + 2) * 4,
    }
    yield Table(
        title="What a program holds on the chip, in 16 bits with sums in float32",
        headers=("", "bytes"),
        rows=tuple((name, quantity(size, "B")) for name, size in (*parts.items(), ("together", sum(parts.values())))),
        totals=1,
    )
    yield from prose(
        f"The scores of all heads and {tokens} tokens would be {quantity(heads * tokens * tokens * 4, 'B')} in float32."
        f" A program has {quantity(ROWS * COLUMNS * 4, 'B')} of them at a time, whatever the number of tokens."
    )


def _exact(context: Context) -> Iterator[Part]:
    """The lines against float64, on sizes that are no multiples of a block."""
    problem = native.triton_problem()
    if problem or not context.measures:
        if problem and context.measures:
            yield from prose(f"The lines were not run here, as {problem}.")
        return
    if context.gpu:
        run = native.load_triton(SOURCE)["attention"]
        inputs = [torch.randn(1, 2, 300, 64, dtype=torch.float16, device=context.device) for _ in range(3)]
        error = (run(*inputs, causal=True) - by_torch(*(one.double() for one in inputs))).abs().max().item()
        where = "on the GPU, in float16, 300 tokens in blocks of 128 x 64"
    else:
        error = float(native.interpret_triton(SOURCE, CHECK))
        where = "in Triton's interpreter, in float32, 75 tokens in blocks of 32 x 16"
    yield from prose(
        f"Run as shown {where}, causal: the largest error against float64 is {error:.1g}. Every row starts from a"
        " maximum of -inf, and exp2(-inf) is 0, so that nothing is taken over into its first block."
    )
