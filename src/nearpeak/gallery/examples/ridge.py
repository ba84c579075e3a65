"""Compute-bound or memory-bound: one product, from a vector to a square matrix.

A product of an M x K and a K x N matrix does 2 M K N operations on M K + K N + M N numbers. With M = K fixed, N decides
how often each number of the large matrix is used: with N = 1 it is read for one multiplication, and memory limits;
with large N the matrix units do. The intensity at which the two meet is the machine's ridge.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import FLOOR, Context
from nearpeak.render.picture.plot import Series
from nearpeak.units import quantity, significant

ABOVE = 1.05
"""How many times the roof a rate may seem to be; both were measured, and vary by some percent."""
WHOLE = 8
"""Columns that the matrix units multiply by at least: PTX ISA, shapes of mma and wgmma. Vectors of CPUs are as long."""


def example(context: Context) -> Iterator[Part]:
    """N from 1 to the size of the square."""
    side = context.pick(gpu=8192, cpu=1024)
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    name = str(dtype).removeprefix("torch.")
    a = torch.randn(side, side, dtype=dtype, device=context.tensors)
    rows: list[tuple[int, float, Prediction]] = []
    columns = 1
    while columns <= side:
        b = torch.randn(side, columns, dtype=dtype, device=context.tensors)
        flops = 2 * side * side * columns
        moved = (side * side + 2 * side * columns) * dtype.itemsize
        # Libraries have kernels for a vector and for whole tiles. For what is neither, the least is known, and no more.
        least = context.estimate(torch.mm, a, b).as_written_s if 1 < columns < WHOLE else None
        band = None if least is None else FLOOR
        row = context.row(f"N = {columns}", torch.mm, a, b, predicted=least, band=band)
        rows.append((columns, flops / moved, row))
        columns *= 4 if columns < side // 4 else 2
    ridge = context.machine.ridge(name)
    yield from prose(
        f"The ridge of {context.machine.name} in {name} is at {ridge:.0f} FLOP per byte. Left of it the rate grows with"
        " the intensity, and time hardly changes with N; right of it the rate stays, and time grows with N."
    )
    yield prediction_table(f"M = K = {side}, {name}", [row for _, _, row in rows])
    yield from _between([(n, row) for n, _, row in rows if 1 < n < WHOLE], rows[0][2], a.nbytes)

    def rates(seconds: list[float | None]) -> tuple[tuple[float, float], ...]:
        pairs = zip(rows, seconds, strict=True)
        return tuple((intensity, 2 * side * side * n / time) for (n, intensity, _), time in pairs if time)

    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    ends = (rows[0][1] / 2, ridge, max(4 * ridge, 2 * rows[-1][1]))
    roof = tuple((at, min(ceilings.peak(name), at * ceilings.bandwidth)) for at in ends)
    series = [
        Series(name="roof", points=roof, markers=False, dashed=True),
        Series(name="predicted", points=rates([row.predicted for _, _, row in rows])),
    ]
    measured = rates([row.measured for _, _, row in rows])
    if context.measures:
        series.append(Series(name="measured", points=measured))
    yield Plot(
        title="Under the roof",
        series=tuple(series),
        x_label="FLOP per byte",
        y_label="FLOP/s",
        y_unit="FLOP/s",
        log_x=True,
        log_y=True,
    )
    above = max((rate for _, rate in measured), default=0.0) / ceilings.peak(name)
    if above > ABOVE:
        yield from prose(
            f"The best rate that was measured is {significant(above, 2)} times the roof. Nothing can be above a roof:"
            " this one was measured too low, while something else ran. `nearpeak machine --calibrate` on an idle"
            " machine measures it again."
        )


def _between(narrow: list[tuple[int, Prediction]], vector: Prediction, size: int) -> Iterator[Part]:
    """Why products of a few columns have a floor and no estimate."""
    for columns, row in narrow:
        text = (
            f"N = {columns} is between: more than the one column for which libraries have kernels of their own, and"
            f" fewer than the {WHOLE} that matrix units take at once. The large matrix is read once for all columns, so"
            " that the time could be that of one column; how near a library comes is not known before. What stands"
            f" there as predicted is the least: {quantity(size, 'B')} at the machine's bandwidth."
        )
        if row.ratio and vector.measured and row.measured:
            text += f" Measured, it took {significant(row.ratio, 2)} times that"
            longer = row.measured / vector.measured
            room = f", and {significant(longer, 2)} times as long as one column: room for a kernel that is made for it."
            text += room if longer > ABOVE else "."
        yield from prose(text)
