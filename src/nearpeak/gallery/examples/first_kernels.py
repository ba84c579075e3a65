"""Fused softmax and vector add as first Triton kernels.

A kernel that adds two vectors is as fast as torch's, since both read two numbers and write one. A softmax written out
in torch goes over its numbers five times; a kernel that holds a row on the chip reads and writes each number once.
Both kernels are a few lines. Their time is predicted by their bytes, and so is the least that torch's softmax takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nearpeak import kernels
from nearpeak.gallery.parts import Part, Prediction, prediction_table, prose
from nearpeak.gallery.run import FLOOR, Context
from nearpeak.render.document import CodeBlock, Table
from nearpeak.units import quantity, significant
from nearpeak.units import seconds as duration

ADD = """
@triton.jit
def add_kernel(x, y, result, elements, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    left = tl.load(x + place, mask=inside)
    right = tl.load(y + place, mask=inside)
    tl.store(result + place, left + right, mask=inside)


def add(x, y):
    result = torch.empty_like(x)
    programs = triton.cdiv(x.numel(), 4096)
    add_kernel[(programs,)](x, y, result, x.numel(), BLOCK=4096)
    return result
"""
SOFTMAX = """
@triton.jit
def softmax_kernel(x, result, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    row = tl.load(x + place, mask=inside, other=-float("inf"))
    row = row.to(tl.float32)
    weights = tl.exp(row - tl.max(row, 0))
    shares = weights / tl.sum(weights, 0)
    tl.store(result + place, shares, mask=inside)


def softmax(x):
    rows, columns = x.shape
    result = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    softmax_kernel[(rows,)](x, result, columns, BLOCK=block)
    return result
"""
LIMITED = (
    " On a CPU of this kind torch's softmax is limited by its arithmetic and not by its bytes, and fusing saves no"
    " arithmetic."
)


def written_out(x: Tensor) -> Tensor:
    """A softmax of rows in five steps."""
    top = x.amax(-1, keepdim=True)
    weights = (x - top).exp()
    return weights / weights.sum(-1, keepdim=True)


def by_torch(x: Tensor) -> Tensor:
    """In one step."""
    return torch.softmax(x, -1)


def example(context: Context) -> Iterator[Part]:
    """The sources, the bytes, and the times."""
    rows, columns = context.pick(gpu=(16384, 4096), cpu=(4096, 1024))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    x, y = (torch.randn(rows, columns, dtype=dtype, device=context.tensors) for _ in range(2))
    size = rows * columns * dtype.itemsize
    yield from prose(
        "A Triton kernel is a program that runs many times at once, each with a number of its own, on a block of"
        " numbers at a time. This one adds vectors, and the kernel of `nearpeak.kernels.add` has no more lines:"
    )
    yield CodeBlock(text=ADD.strip())
    yield from prose("A softmax of rows that fit on the chip, with a program for each row:")
    yield CodeBlock(text=SOFTMAX.strip())
    yield from prose(
        "`nearpeak.kernels.softmax` is this with what users ask for: rows of any length, several short ones for one"
        " program, scale, masks, causality, and a backward pass."
    )

    forms: list[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = [
        ("add", torch.add, (x, y)),
        ("softmax, written out", written_out, (x,)),
        ("softmax", by_torch, (x,)),
    ]
    counts = {name: context.estimate(fn, *args) for name, fn, args in forms}
    yield Table(
        title=f"Bytes: {rows} x {columns} in {str(dtype).removeprefix('torch.')}, {quantity(size, 'B')}",
        headers=("", "reads", "writes", "times the tensor"),
        rows=tuple(
            (
                name,
                quantity(estimate.work.bytes_read, "B"),
                quantity(estimate.work.bytes_written, "B"),
                significant(estimate.bytes / size, 2),
            )
            for name, estimate in counts.items()
        ),
    )
    more = counts["softmax, written out"].bytes / counts["softmax"].bytes
    yield from prose(
        f"Written out, a softmax moves {significant(more, 2)} times the bytes of a fused one: the row maxima read"
        " everything once, the differences, the exponentials and the quotients read and write everything, and the sums"
        " read it once more."
    )

    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    by_bytes = {name: estimate.bytes / ceilings.bandwidth for name, estimate in counts.items()}
    expected = context.predict(by_torch, x)
    found_rows = [
        context.row("add, torch", torch.add, x, y, predicted=by_bytes["add"]),
        context.row("softmax, written out, torch", written_out, x),
        context.row("softmax, torch", by_torch, x, predicted=by_bytes["softmax"], band=FLOOR),
    ]
    if context.gpu:
        ours = [
            context.row("add, nearpeak", kernels.add, x, y, predicted=by_bytes["add"]),
            context.row("softmax, nearpeak", kernels.softmax, x, predicted=by_bytes["softmax"]),
        ]
        found_rows += ours
    bandwidth = quantity(ceilings.bandwidth, "B/s")
    yield prediction_table(
        "Time",
        found_rows,
        note=f"Predicted as their bytes at {bandwidth}; written out, as what torch's kernels for such steps reach on a"
        " machine of this kind. For torch's softmax in one step the bytes are the least that it takes.",
    )
    yield from _room(found_rows[2], expected)
    out, fused = found_rows[1], found_rows[-1]
    seconds = [row.measured or row.predicted or math.nan for row in (out, fused)]
    least = by_bytes["softmax"]
    yield from prose(
        f"The softmax in one step takes {seconds[1] / seconds[0]:.0%} of the time of the one written out,"
        f" as {'measured' if context.measures else 'predicted'} here, and {significant(seconds[1] / least, 2)} times"
        f" what its bytes take at {bandwidth}." + ("" if context.gpu or expected < 4 * least else LIMITED)
    )
    if context.measures:
        yield from exact(context)


def _room(row: Prediction, expected: float) -> Iterator[Part]:
    """How far torch's softmax is from what its bytes take."""
    assert row.predicted
    taken = row.measured or expected
    yield from prose(
        f"torch's softmax in one step {'takes' if row.measured else 'is expected to take'} {duration(taken)}:"
        f" {row.predicted / taken:.0%} of the memory's speed. It reads and writes no more than it must; the rest is"
        " what its threads do for each number and each row, and changes with the length of rows. That is the room that"
        " a kernel of one's own has."
    )


def exact(context: Context) -> Iterator[Part]:
    """Both functions against float64, on a few numbers."""
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).to(context.device)
    y = x.flip(0).contiguous()
    pairs = (
        ("add", kernels.add(x, y), x.double() + y.double()),
        ("softmax", kernels.softmax(x), torch.softmax(x.double(), -1)),
    )
    errors = ", ".join(f"{name} {(result - right).abs().max().item():.1g}" for name, result, right in pairs)
    support = kernels.supports(kernels.softmax, x)
    ran = "the kernels ran" if support else f"plain torch ran in place of the kernels, as {support.reason}"
    yield from prose(f"Largest errors of `nearpeak.kernels` in float32 against float64: {errors}. Here {ran}.")
