"""Fewer operations are not less time: Strassen's product, and recomputing that wins and loses.

Two ways to trade operations for bytes. Strassen's algorithm multiplies matrices with seven products of half the size in
place of eight, and pays with eighteen additions of half-size matrices: fewer operations, more bytes. Recomputing goes
the other way: what can be computed again need not be written and read. Neither is good or bad by itself. What decides
is which of the two the machine has left, and that is known before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.gallery.parts import Part, Plot, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import CodeBlock, Table
from nearpeak.render.picture.bars import Bar
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, quantity, seconds, significant

SHOWN = """
def strassen(a, b):
    a11, a12, a21, a22 = quarters(a)
    b11, b12, b21, b22 = quarters(b)
    m1 = (a11 + a22) @ (b11 + b22)
    m2 = (a21 + a22) @ b11
    m3 = a11 @ (b12 - b22)
    m4 = a22 @ (b21 - b11)
    m5 = (a11 + a12) @ b22
    m6 = (a21 - a11) @ (b11 + b12)
    m7 = (a12 - a22) @ (b21 + b22)
    top = torch.cat([m1 + m4 - m5 + m7, m3 + m5], 1)
    return torch.cat([top, torch.cat([m2 + m4, m1 - m2 + m3 + m6], 1)])
"""


def quarters(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its four blocks, as views."""
    half = len(matrix) // 2
    return matrix[:half, :half], matrix[:half, half:], matrix[half:, :half], matrix[half:, half:]


def strassen(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with seven products of half the size."""
    a11, a12, a21, a22 = quarters(a)
    b11, b12, b21, b22 = quarters(b)
    m1 = (a11 + a22) @ (b11 + b22)
    m2 = (a21 + a22) @ b11
    m3 = a11 @ (b12 - b22)
    m4 = a22 @ (b21 - b11)
    m5 = (a11 + a12) @ b22
    m6 = (a21 - a11) @ (b11 + b12)
    m7 = (a12 - a22) @ (b21 + b22)
    top = torch.cat([m1 + m4 - m5 + m7, m3 + m5], 1)
    return torch.cat([top, torch.cat([m2 + m4, m1 - m2 + m3 + m6], 1)])


def stored_scores(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of attention whose weights, one for each query and key, are kept from forward to backward."""
    weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    return torch.autograd.grad(weights @ value, (query, key, value), grad)


def recomputed_scores(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The same by a fused kernel, which computes the weights again in backward, block by block."""
    result = functional.scaled_dot_product_attention(query, key, value)
    return torch.autograd.grad(result, (query, key, value), grad)


def stored_activation(grad: Tensor, hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of GELU, of an input that was kept."""
    result: Tensor = torch.ops.aten.gelu_backward(grad, hidden)
    return result


def recomputed_activation(grad: Tensor, hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The same with the input computed again by the product that made it."""
    result: Tensor = torch.ops.aten.gelu_backward(grad, x @ weight)
    return result


def example(context: Context) -> Iterator[Part]:
    """Strassen: counts, times, sizes; then two pairs of recomputing."""
    yield from _strassen(context)
    yield from _recomputing(context)


def _strassen(context: Context) -> Iterator[Part]:
    size = context.pick(gpu=8192, cpu=1024)
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=context.tensors) for _ in range(2))
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"plain": torch.mm, "Strassen": strassen}
    estimates = {name: context.estimate(way, a, b) for name, way in ways.items()}
    yield from prose("One level of Strassen's algorithm:")
    yield CodeBlock(text=SHOWN.strip())
    yield Table(
        title=f"Two matrices of {size} x {size} in {str(dtype).removeprefix('torch.')}",
        headers=("", "FLOP", "bytes", "at least", "expected"),
        rows=tuple(
            (
                name,
                quantity(one.flops, ""),
                quantity(one.bytes, "B"),
                seconds(one.as_written_s),
                seconds(one.expected_device_s or one.as_written_s),
            )
            for name, one in estimates.items()
        ),
        note="At least: each operation at its roofline. Expected: what torch's kernels take.",
    )
    rows = [context.row(name, way, a, b) for name, way in ways.items()]
    yield prediction_table("Time", rows)
    bars = []
    for name, one in estimates.items():
        products = sum(op.expected_seconds or op.seconds for op in one.ops if op.family == "matrix")
        rest = sum(op.expected_seconds or op.seconds for op in one.ops if op.family != "matrix")
        bars.append(Bar(name=name, pieces=(("products", products), ("additions and copies", rest))))
    yield StackedBars(title="Where the time is expected to go", bars=tuple(bars))
    sizes = context.pick(gpu=(4096, 8192, 16384, 32768), cpu=(512, 1024, 2048, 4096))
    points = []
    for side in sizes:
        fake = torch.empty(side, side, dtype=dtype, device="meta")
        points.append((float(side), context.predict(strassen, fake, fake) / context.predict(torch.mm, fake, fake)))
    yield Plot(
        title="Strassen or plain, predicted",
        series=(
            Series(name="predicted", points=tuple(points)),
            Series(name="7 / 8", points=((points[0][0], 7 / 8), (points[-1][0], 7 / 8)), markers=False, dashed=True),
            Series(name="equal", points=((points[0][0], 1.0), (points[-1][0], 1.0)), markers=False, dashed=True),
        ),
        x_label="rows and columns",
        y_label="time, Strassen / plain",
        y_unit="x",
        log_x=True,
    )
    plain, other = (row.measured or row.predicted or 1.0 for row in rows)
    extra = estimates["Strassen"].bytes / estimates["plain"].bytes
    even = next((side for side, ratio in points if ratio < 1), None)
    reach = (
        f"From about {even:.0f} rows on it is predicted to win"
        if even
        else f"Up to {points[-1][0]:.0f} rows it is predicted to lose"
    )
    how = "measured" if context.measures else "predicted"
    yield from prose(
        f"Strassen does {percent(1 - estimates['Strassen'].flops / estimates['plain'].flops)} fewer operations, moves"
        f" {significant(extra, 2)} times the bytes, and takes {significant(other / plain)} times as long, as {how}"
        " here. Operations fall by an eighth; additions grow with the square of the size and products with its cube, so"
        f" that the price falls with the size. {reach}. A kernel that adds while it loads would save most of the bytes."
    )
    if context.measures:
        yield from prose(_accuracy())


def _accuracy() -> str:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    right = a.double() @ b.double()
    errors = [((way(a, b) - right).abs().max() / right.abs().max()).item() for way in (torch.mm, strassen)]
    return (
        f"It is also less exact: the largest error in float32 is {significant(errors[1] / errors[0], 2)} times that of"
        " the plain product at 256 x 256, since differences of large sums cancel."
    )


def _recomputing(context: Context) -> Iterator[Part]:
    tokens, width = context.pick(gpu=(8192, 4096), cpu=(2048, 512))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=context.tensors)

    heads = context.pick(gpu=(4, 16, 2048, 128), cpu=(1, 4, 256, 64))
    attended = (*(draw(*heads).requires_grad_() for _ in range(3)), draw(*heads))
    hidden, x, weight = draw(tokens, 4 * width), draw(tokens, width), draw(width, 4 * width)
    pairs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "weights of attention, stored": (stored_scores, attended),
        "weights of attention, recomputed": (recomputed_scores, attended),
        "input of GELU, stored": (stored_activation, (hidden, hidden, x, weight)),
        "input of GELU, recomputed": (recomputed_activation, (hidden, hidden, x, weight)),
    }
    band = (0.7, 1.4) if context.gpu else None
    rows = {name: context.row(name, fn, *args, band=band) for name, (fn, args) in pairs.items()}
    size = quantity(heads[0] * heads[1] * heads[2] ** 2 * dtype.itemsize, "B")
    yield from prose(
        f"Recomputing. The weights of attention, {heads[0]} x {heads[1]} heads of {heads[2]} x {heads[2]}, are either"
        f" kept for the backward pass, {size}, or computed again from queries and keys, block by block. The input of a"
        f" GELU, {tokens} x {4 * width}, is either kept for the backward pass or computed again by a product with"
        f" {width} x {4 * width}."
    )
    yield prediction_table("Stored or recomputed", list(rows.values()))
    weights, gelu = (_gain(rows, name) for name in ("weights of attention", "input of GELU"))
    counts = {name: context.estimate(fn, *args) for name, (fn, args) in pairs.items()}
    saved = counts["weights of attention, stored"].bytes - counts["weights of attention, recomputed"].bytes
    again = counts["weights of attention, recomputed"].flops / counts["weights of attention, stored"].flops
    added = counts["input of GELU, recomputed"].flops - counts["input of GELU, stored"].flops
    yield from prose(
        f"The weights, recomputed, take {significant(weights)} times as long, forward and backward, with"
        f" {significant(again)} times the operations: {quantity(saved, 'B')} need not cross memory. The input of the"
        f" GELU, recomputed, takes {significant(gelu)} times as long: {quantity(added, 'FLOP')} more, to save"
        f" {quantity(hidden.nbytes, 'B')} of memory. That may still be right where memory is what is missing: the time"
        " is its price."
    )


def _gain(rows: dict[str, Prediction], name: str) -> float:
    stored, again = (rows[f"{name}, {how}"] for how in ("stored", "recomputed"))
    return (again.measured or again.predicted or 1.0) / (stored.measured or stored.predicted or 1.0)
