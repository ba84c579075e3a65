"""The tiling ladder: naive, lines, tiles, tensor cores.

A matrix product does 2 n^3 operations on 3 n^2 numbers, so it need not wait for memory; a naive one does, as it loads
two numbers for each multiplication. What makes each rung of the ladder faster than the one below is the tile of results
that share what is loaded: with r rows and c columns each number of the matrices is loaded n / c or n / r times. From
the tile follow the bytes that are asked for, and the intensity; the time follows, until arithmetic is the limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearpeak.gallery import native
from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import FLOOR, Context
from nearpeak.kernels import ladder
from nearpeak.render.document import CodeBlock, Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import quantity, seconds, significant

TINY = """
// A thread for R x C results: it loads R + C numbers for R * C
// multiplications.
extern "C" __global__ void tiny(
    const unsigned short* a, const unsigned short* b,
    unsigned short* c, int n
) {
    int column = blockIdx.x * 32 * C + threadIdx.x;  // and every 32nd on
    int row = (blockIdx.y * 8 + threadIdx.y) * R;
    float sums[R][C] = {};
    for (int step = 0; step < n; ++step) {
        float left[R], right[C];
        for (int i = 0; i < R; ++i)
            left[i] = widened(a[(size_t)(row + i) * n + step]);
        for (int j = 0; j < C; ++j)
            right[j] = widened(b[(size_t)step * n + column + 32 * j]);
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < C; ++j) sums[i][j] += left[i] * right[j];
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < C; ++j)
            c[(size_t)(row + i) * n + column + 32 * j] =
                rounded(sums[i][j]);
}
"""
C_TINY = """
void tiny(const float *a, const float *b, float *c, long n) {
    for (long row = 0; row < n; row += R)
        for (long column = 0; column < n; column += C) {
            float sums[R][C] = {{0}};
            const float *left = a + row * n, *right = b + column;
            for (long step = 0; step < n; ++step)
                for (int i = 0; i < R; ++i)
                    for (int j = 0; j < C; ++j)
                        sums[i][j] +=
                            left[i * n + step] * right[step * n + j];
            float *out = c + row * n + column;
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < C; ++j) out[i * n + j] = sums[i][j];
        }
}
"""
SIDES = ((1, 1), (1, 2), (2, 2))
"""Rows and columns of the tiles by hand."""
MULTIPLY_CYCLES, CORE_HZ = 4, 3e9
"""Latency of a multiply-add of a core (uops.info), and about its clock: a sum waits that long for each step."""
LINE = 128
"""Bytes that the L1 cache of a multiprocessor gives in a clock: NVIDIA H100 and A100 architecture whitepapers."""
SIDE = 64
"""Of a block of results on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rung: how it multiplies, what it asks for, and what it takes at least."""

    name: str
    multiply: Callable[[Tensor, Tensor], object]
    asked: float | None
    """Bytes; None where the tile is not known before it runs."""
    predicted: float
    """Seconds."""
    band: tuple[float, float | None] | None = None


def on_gpu(context: Context, a: Tensor, b: Tensor) -> Iterator[Step]:
    """The rungs of `nearpeak.kernels.ladder`.

    A plain thread and the first rung on tensor cores have a floor, and the last two take what a good product takes.
    """
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    size = len(a)
    flops = 2.0 * size**3
    clock, processors = context.machine.clock_boost_hz, context.machine.processors
    for rung in (ladder.NAIVE, ladder.LINES, ladder.TILES, ladder.TENSOR_CORES, ladder.PERSISTENT, ladder.VENDOR):
        if rung is ladder.LINES:
            yield from _tiny_on_gpu(context, size, clock, processors)
        asked = None if rung is ladder.VENDOR else rung.bytes_read(size, size, size)
        by_threads = rung in (ladder.NAIVE, ladder.LINES, ladder.TILES)
        good = rung in (ladder.PERSISTENT, ladder.VENDOR)
        predicted = context.predict(torch.mm, a, b) if good else flops / ceilings.peak("bfloat16")
        if by_threads:
            predicted = flops / ceilings.vector["float32"]
            if clock and processors and asked:
                predicted = max(predicted, asked / (LINE * processors * clock))
        band = None if good else FLOOR
        if rung is ladder.PERSISTENT and context.measures and torch.cuda.get_device_capability()[0] < 9:
            continue  # it copies by TMA, which came with Hopper
        if rung is ladder.TENSOR_CORES:
            # Without pipelining a tile waits for its operands: copies and products add up, and overlap less.
            yield Step(
                name=f"{rung.title}, not pipelined", multiply=_one_stage, asked=asked, predicted=predicted, band=FLOOR
            )
        yield Step(name=rung.title, multiply=rung.multiply, asked=asked, predicted=predicted, band=band)


def _tiny_on_gpu(context: Context, size: int, clock: float | None, processors: int | None) -> Iterator[Step]:
    """Tiles of two and four results per thread, by hand."""
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    if context.measures and native.cuda_problem():
        return
    for high, wide in SIDES[1:]:
        tile = ladder.Tile(rows=high, columns=32 * wide, row_bytes=ladder.SECTOR)
        asked = tile.bytes_read(size, size, size)
        predicted = 2.0 * size**3 / ceilings.vector["float32"]
        if clock and processors:
            predicted = max(predicted, asked / (LINE * processors * clock))
        yield Step(
            name=f"{high} x {wide} numbers a thread",
            multiply=partial(_multiply_tiny, high, wide),
            asked=asked,
            predicted=predicted,
            band=FLOOR,
        )


def _multiply_tiny(high: int, wide: int, a: Tensor, b: Tensor) -> Tensor:
    kernel = native.cuda_kernel(f"#define R {high}\n#define C {wide}\n{TINY}", "tiny")
    result, size = torch.empty_like(a), len(a)
    kernel(grid=(size // (32 * wide), size // (8 * high), 1), block=(32, 8, 1), args=[a, b, result, size])
    return result


def _one_stage(a: Tensor, b: Tensor) -> Tensor:
    from nearpeak.kernels.ladder import triton as ladder_triton

    return ladder_triton.multiply_tensor_cores(a, b, stages=1)


def numbers(a: Tensor, b: Tensor) -> Tensor:
    """A scalar product for each number of the result."""
    columns = b.T.contiguous().unbind()
    return torch.stack([torch.dot(row, column) for row in a.unbind() for column in columns]).view(len(a), -1)


def rows(a: Tensor, b: Tensor) -> Tensor:
    """A vector by the matrix for each row."""
    return torch.stack([torch.mv(b.T, row) for row in a.unbind()])


def blocks(a: Tensor, b: Tensor) -> Tensor:
    """A product for each block of results."""
    return torch.cat([torch.cat([part @ piece for piece in b.split(SIDE, 1)], 1) for part in a.split(SIDE)])


def on_cpu(context: Context, a: Tensor, b: Tensor) -> Iterator[Step]:
    """The same with calls of torch, each for a tile of results.

    They take what such calls are expected to take. A call for a number is nothing but its fixed cost, and that of
    putting the number into its place.
    """
    ceilings = context.machine.achievable
    assert ceilings is not None
    size, call = len(a), ceilings.launch.host_call or 0.0
    tiled: list[tuple[str, Callable[[Tensor, Tensor], Tensor], int, int]] = [
        ("a call for each number", numbers, 1, 1),
        ("a call for each row", rows, 1, size),
        (f"a call for {SIDE} x {SIDE}", blocks, SIDE, SIDE),
        ("one call", torch.mm, size, size),
    ]
    for high, wide in SIDES:
        library = native.compile_c(f"#define R {high}\n#define C {wide}\n{C_TINY}") if context.measures else None
        if context.measures and library is None:
            continue
        yield Step(
            name=f"C, {high} x {wide} numbers a turn",
            multiply=partial(_multiply_c, library),
            asked=size * size // (high * wide) * (high + wide) * size * 4.0,
            predicted=size**3 * MULTIPLY_CYCLES / CORE_HZ / (high * wide),
            band=(0.4, 2.5),
        )
    for name, multiply, high, wide in tiled:
        calls = size * size // (high * wide)
        predicted = 2 * calls * call if multiply is numbers else context.predict(multiply, a, b)
        asked = calls * (high + wide) * size * 4.0
        yield Step(name=name, multiply=multiply, asked=asked, predicted=predicted)


def _multiply_c(library: Any, a: Tensor, b: Tensor) -> Tensor:
    result = torch.empty_like(a)
    library.tiny(native.pointer(a), native.pointer(b), native.pointer(result), ctypes.c_long(len(a)))
    return result


def example(context: Context) -> Iterator[Part]:
    """Tiles, intensities, times."""
    size = context.pick(gpu=4096, cpu=192)
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=context.tensors) for _ in range(2))
    flops = 2.0 * size**3
    steps = list((on_gpu if context.gpu else on_cpu)(context, a, b))
    yield from prose(
        f"All rungs multiply matrices of {size} x {size}: {quantity(flops, 'FLOP')}, and"
        f" {quantity(3 * size * size * dtype.itemsize, 'B')} if each number crossed memory once. A tile of r x c"
        " results loads r + c numbers for r c multiplications, so that the intensity grows with the side of the tile."
    )
    yield from prose("Tiles of one, two and four numbers by hand, before the wide ones:")
    yield CodeBlock(text=(TINY if context.gpu else C_TINY).strip(), language="cpp" if context.gpu else "c")
    yield Table(
        title="What is asked for, and how often it is used",
        headers=("", "asked for", "FLOP per byte"),
        rows=tuple(
            (
                step.name,
                quantity(step.asked, "B"),
                significant(flops / step.asked) if step.asked else "-",
            )
            for step in steps
        ),
        note="From the caches, mostly; which tile the vendor's product has is known after it has run."
        if context.gpu
        else "",
    )
    predictions: list[tuple[Step, Prediction]] = []
    for step in steps:
        # Few blocks: the lowest rungs take long enough for one to be a good measurement.
        row = context.row(step.name, step.multiply, a, b, predicted=step.predicted, band=step.band, min_blocks=6)
        predictions.append((step, row))
    yield prediction_table("Time", [row for _, row in predictions], note=_note(context))

    ways = ("predicted", "measured") if context.measures else ("predicted",)
    series = []
    for how in ways:
        points = [(step.name, flops / step.asked, getattr(row, how)) for step, row in predictions if step.asked]
        rates = tuple((intensity, flops / time) for _, intensity, time in points if time)
        names = tuple(name for name, _, time in points if time)
        labels = tuple(f"{name}, {how}" for name in names)
        texts = names if how == ways[-1] else ()
        series.append(Series(name=how, points=rates, labels=labels, texts=texts, line=False))
    yield Plot(
        title="Rate by intensity",
        series=tuple(series),
        x_label="FLOP per byte asked for",
        y_label="FLOP/s",
        y_unit="FLOP/s",
        log_x=True,
        log_y=True,
    )
    times = [row.measured or row.predicted or 0.0 for _, row in predictions]
    yield from prose(
        f"From the slowest rung to the last the time falls from {seconds(max(times))} to {seconds(times[-1])},"
        f" {significant(max(times) / times[-1])} times, as {ways[-1]} here; the operations are the same."
    )


def _note(context: Context) -> str:
    if context.gpu:
        return (
            "Predicted for plain threads, and for the first rung on tensor cores, is a floor: the longer of the"
            f" operations at the peak of their units and the bytes at {LINE} a clock from the L1 cache of each"
            " multiprocessor. The last two are predicted as what a good product is expected to take. Not pipelined:"
            " the same kernel without copies ahead of their use, so that the tensor cores wait for each tile."
        )
    return (
        "Predicted as what such calls were measured to take on a machine of this kind; for each number, the fixed cost"
        " of a call and of putting the number into its place. In C, a sum waits for each of its steps, and two or four"
        " of them wait together."
    )
