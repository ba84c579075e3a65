"""Parallelize: tiles, waves, and the processors that wait in the last one.

A product is cut into tiles, and each processor computes one tile at a time. When there is one tile more than there are
processors, a second wave begins for that tile alone, and all others wait. So time grows in steps and not in a line,
and the share of the peak that is reached falls after each step and climbs again, like the teeth of a saw. A library
that has tiles of many sizes takes one that fits, and nearly gets rid of the steps. The same holds for chunks of work
over the cores of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from nearpeak.bound.estimate import EstimatedOp
from nearpeak.bound.tiles import Tiling
from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context, SkipExample
from nearpeak.kernels import ladder
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, seconds

ROWS, DEPTH, STEP = 1024, 4096, 256
"""The product on a GPU: rows and contraction stay, columns grow in steps."""
WAVES = 3
HALVES = 4
"""So many times half a wave of the fixed tile is filled, and one step of columns more."""
WIDTHS = {"hopper": 8, "blackwell": 16}
"""By how many columns tiles may differ, where one instruction gives 64 or more rows of a tile and up to 256 columns:
PTX ISA, shapes of wgmma.mma_async and of tcgen05.mma."""
MARKED = 24
"""Up to how many predictions have a mark each."""
CHUNK = 256
"""Edge of the product that is one chunk of work on a CPU."""

Times = Mapping[int, float]


def example(context: Context) -> Iterator[Part]:
    """Tiles over multiprocessors, or chunks over cores."""
    yield from _tiles(context) if context.gpu else _chunks(context)


def in_tiles(tiling: Tiling, rows: int, columns: int) -> Tiling:
    """The same product in tiles of another size."""
    tiles = tiling.batch * math.ceil(tiling.m / rows) * math.ceil(tiling.n / columns)
    return replace(tiling, tile=(rows, columns, tiling.tile[2]), tiles=tiles)


def that_fit(tiling: Tiling, architecture: str) -> Tiling:
    """In the tiles from 128 x 128 to 128 x 256, or as wide as high, that leave the largest share of the peak.

    Where instructions allow no sizes between, the tiling as it is: the best of the usual sizes.
    """
    step = WIDTHS.get(architecture)
    if step is None:
        return tiling
    sides = range(128, 256 + 1, step)
    candidates = [in_tiles(tiling, *tile) for side in sides for tile in ((side, 128), (128, side))]
    return max(candidates, key=lambda one: (round(one.efficiency, 9), one.tile[0] * one.tile[1]))


def _tiles(context: Context) -> Iterator[Part]:
    def factors(columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = ((ROWS, DEPTH), (DEPTH, columns))
        left, right = (torch.randn(*shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        return left, right

    def estimated(columns: int) -> tuple[EstimatedOp, Tiling]:
        (op,) = context.estimate(torch.mm, *factors(columns, "meta")).ops
        if op.tiling is None:
            raise SkipExample(f"the tiles of {context.machine.name} or the number of its processors are not known.")
        return op, op.tiling

    architecture = context.machine.architecture
    processors = estimated(STEP)[1].processors
    wave = (
        processors * ladder.PERSISTENT_ROWS * ladder.PERSISTENT_COLUMNS // ROWS
    )  # columns of a full wave of the fixed tile
    most = math.ceil(WAVES * wave / STEP) * STEP
    # What kernels reach of the peak where waves hardly matter: the largest product, its own loss to waves taken out.
    large, tiling = estimated(8 * most)
    rate = large.flops / (large.expected_seconds or large.seconds) / tiling.efficiency
    start = context.predict(torch.mm, *(one[:1, :1] for one in factors(STEP, "meta")))
    sizes = range(4 * STEP, most, STEP)
    usual = {columns: estimated(columns)[1] for columns in sizes}
    fixed = {
        columns: in_tiles(one, ladder.PERSISTENT_ROWS, ladder.PERSISTENT_COLUMNS) for columns, one in usual.items()
    }
    fitting = {columns: that_fit(one, architecture) for columns, one in usual.items()}

    def times(tilings: Mapping[int, Tiling]) -> Times:
        return {n: start + 2 * ROWS * DEPTH * n / rate / one.efficiency for n, one in tilings.items()}

    one_size, sizes_that_fit = times(fixed), times(fitting)
    halves = [half * wave // 2 // STEP * STEP for half in range(1, HALVES + 1)]
    shown = [columns for before in halves for columns in (before, before + STEP)]
    tile = f"{ladder.PERSISTENT_ROWS} x {ladder.PERSISTENT_COLUMNS}"
    yield from prose(
        f"A product of {ROWS} x {DEPTH} by {DEPTH} x N in bfloat16 on {processors} multiprocessors. A wave of tiles of"
        f" {tile} takes {seconds(2 * DEPTH * ROWS * wave / rate)}, with all multiprocessors busy or with one of them; a"
        f" tile that is cut by the edge costs as much as a whole one. Any product takes {seconds(start)} besides, as"
        " one of 1 x 1 does."
    )
    yield Table(
        title="One size of tile, and a size that fits",
        headers=("N", f"tiles of {tile}", "waves", "last wave", "of peak", "tiles that fit", "of peak"),
        rows=tuple(
            (
                f"{columns}",
                f"{fixed[columns].tiles}",
                f"{fixed[columns].waves}",
                percent(fixed[columns].last_wave, 0),
                percent(fixed[columns].efficiency, 0),
                "{} of {} x {}".format(fitting[columns].tiles, *fitting[columns].tile),
                percent(fitting[columns].efficiency, 0),
            )
            for columns in shown
        ),
        note=_sizes(architecture),
    )
    given = {columns: factors(columns, context.tensors) for columns in shown}
    mine: dict[int, Prediction] = {}
    if architecture in WIDTHS:  # the kernel copies by TMA, as no GPU before Hopper does
        mine = {
            n: context.row(f"N = {n}", ladder.multiply_persistent, *given[n], predicted=one_size[n], max_seconds=0.2)
            for n in shown
        }
        yield prediction_table(f"Tiles of {tile}: the persistent kernel of the tiling ladder", list(mine.values()))
    theirs = {
        n: context.row(f"N = {n}", torch.mm, *given[n], predicted=sizes_that_fit[n], max_seconds=0.2) for n in shown
    }
    yield prediction_table("Tiles that fit: torch.mm", list(theirs.values()))
    yield from _pictures(
        context,
        "N",
        {n: 2.0 * ROWS * DEPTH * n for n in sizes},
        {f"tiles of {tile}": one_size, "tiles that fit": sizes_that_fit},
        {f"tiles of {tile}": mine, "tiles that fit": theirs},
    )
    before, after = shown[2:4]
    grown = [
        _grown(f"{kernel}: from N = {before} to N = {after}", rows[before], rows[after], after / before)
        for kernel, rows in ((f"Tiles of {tile}", mine), ("torch.mm", theirs))
        if rows
    ]
    yield from prose(
        *grown,
        "The ways out are sizes that fill the last wave, or a cut of the work that does: tiles that fit the size, or"
        " finer ones, so that a wave is a smaller part of the whole.",
    )


def _sizes(architecture: str) -> str:
    if architecture in WIDTHS:
        return (
            "Tiles that fit: 128 by 128 to 256, or the other way round, in steps of the"
            f" {WIDTHS[architecture]} columns that the matrix instructions allow; the ones that leave the largest share"
            " of the peak."
        )
    return "Tiles that fit: 128 x 128, 256 x 128 or 128 x 256, whichever leaves the largest share of the peak."


def _chunks(context: Context) -> Iterator[Part]:
    cores = torch.get_num_threads() if context.measures else context.machine.processors or 1
    a, b = (torch.randn(CHUNK, CHUNK, device=context.tensors) for _ in range(2))
    chunk = context.predict(torch.mm, a, b) * cores  # predicted for all of them: one alone takes as many times as long
    counts = range(1, WAVES * cores + 1)
    predicted = {count: math.ceil(count / cores) * chunk for count in counts}
    yield from prose(
        f"A chunk of work is a product of two {CHUNK} x {CHUNK} matrices on one core, expected to take"
        f" {seconds(chunk)} here. {cores} threads take chunks until there are none left; with a chunk more than a"
        f" multiple of {cores}, all but one wait for the last."
    )
    measured = sorted({1, *(k * cores for k in range(1, WAVES)), *(k * cores + 1 for k in range(1, WAVES))})
    rows: dict[int, Prediction] = {}
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def work(count: int) -> None:
                for done in [pool.submit(torch.mm, a, b) for _ in range(count)]:
                    done.result()

            for count in measured:
                rows[count] = context.row(f"chunks: {count}", work, count, predicted=predicted[count], cache="hot")
    finally:
        torch.set_num_threads(threads)
    yield prediction_table("Time of all chunks", list(rows.values()))
    yield from _pictures(context, "chunks", {c: 2.0 * CHUNK**3 * c for c in counts}, {"": predicted}, {"": rows})
    last = (WAVES - 1) * cores
    name = f"From {last} chunks to {last + 1} chunks"
    yield from prose(
        f"{_grown(name, rows[last], rows[last + 1], (last + 1) / last)} The way out is to choose sizes that fill the"
        " last wave, or to cut the work finer, so that a wave is a smaller part of the whole."
    )


def _pictures(
    context: Context,
    name: str,
    flops: Mapping[int, float],
    predicted: Mapping[str, Times],
    rows: Mapping[str, dict[int, Prediction]],
) -> Iterator[Part]:
    """Time in steps, and the rate: of each way to cut the work, predicted and measured."""
    few = len(flops) <= MARKED  # lines between few points slope where there are steps, so the points are marked
    curves = [
        (way, "predicted", tuple(points.items()), number) for number, (way, points) in enumerate(predicted.items())
    ]
    if context.measures:
        for number, (way, found) in enumerate(rows.items()):
            taken = tuple((size, row.measured) for size, row in found.items() if row.measured)
            curves += [(way, "measured", taken, number)] if taken else []
    times: list[Series] = []
    rates: list[Series] = []
    for way, how, points, number in curves:
        line = how == "predicted"
        for series, values in ((times, points), (rates, tuple((n, flops[n] / time) for n, time in points))):
            series.append(
                Series(
                    name=f"{way}, {how}" if way else how,
                    points=values,
                    line=line,
                    markers=few or not line,
                    color=number if way else None,
                )
            )
    yield Plot(title="Time in steps", series=tuple(times), x_label=name, y_label="time")
    yield Plot(title="Rate of each size", series=tuple(rates), x_label=name, y_label="FLOP/s", y_unit="FLOP/s")


def _grown(name: str, low: Prediction, high: Prediction, work: float) -> str:
    assert low.predicted and high.predicted
    text = (
        f"{name} there is {percent(work - 1)} more work, and the time is predicted to grow by"
        f" {percent(high.predicted / low.predicted - 1)}"
    )
    if low.measured and high.measured:
        grown = high.measured / low.measured - 1
        text += f"; measured, it {'grew' if grown > 0 else 'fell'} by {percent(abs(grown))}"
    return text + "."
