"""Parallelise: tiles, waves, and the processors that wait in the last one.

A product is cut into tiles, and each processor computes one tile at a time. When there is one tile more than there are
processors, a second wave begins for that tile alone, and all others wait. So time grows in steps and not in a line,
and the share of the peak that is reached falls after each step and climbs again: a saw-tooth. The same holds for chunks
of work over the cores of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

from nearpeak.bound.estimate import EstimatedOp
from nearpeak.bound.tiles import Tiling
from nearpeak.gallery.here import Here
from nearpeak.gallery.parts import Part, Plot, Row, compared, prose
from nearpeak.gallery.running import Skip
from nearpeak.render.document import Table
from nearpeak.render.plot import Series
from nearpeak.units import percent, seconds

ROWS, DEPTH, STEP = 1024, 4096, 256
"""The product on a GPU: rows and contraction stay, columns grow in steps."""
WAVES = 3
STEPS = 4
"""How many of the largest steps are measured."""
MARKED = 24
"""Up to how many predictions have a mark each."""
CHUNK = 256
"""Edge of the product that is one chunk of work on a CPU."""


def example(here: Here) -> Iterator[Part]:
    """Tiles over multiprocessors, or chunks over cores."""
    yield from _tiles(here) if here.gpu else _chunks(here)


def _tiles(here: Here) -> Iterator[Part]:
    def factors(columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = ((ROWS, DEPTH), (DEPTH, columns))
        left, right = (torch.randn(*shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        return left, right

    def estimated(columns: int) -> tuple[EstimatedOp, Tiling]:
        (op,) = here.estimate(torch.mm, *factors(columns, "meta")).ops
        if op.tiling is None:
            raise Skip(f"the tiles of {here.machine.name} or the number of its processors are not known.")
        return op, op.tiling

    ceilings = here.machine.achievable or here.machine.theoretical
    processors = estimated(STEP)[1].processors
    assert ceilings is not None
    most = math.ceil(WAVES * processors * 128 * 256 / ROWS / STEP) * STEP
    # What kernels reach of the peak where waves hardly matter: the largest product, its own loss to waves taken out.
    large, tiling = estimated(8 * most)
    rate = large.flops / (large.expected_seconds or large.seconds) / tiling.efficiency
    sizes = range(4 * STEP, most, STEP)
    found = {columns: estimated(columns)[1] for columns in sizes}
    start = here.predict(torch.mm, *(one[:1, :1] for one in factors(STEP, "meta")))
    predicted = {columns: start + 2 * ROWS * DEPTH * columns / rate / one.efficiency for columns, one in found.items()}
    falls = sorted(
        ((found[before].efficiency - found[after].efficiency, before, after) for before, after in pairwise(sizes)),
        reverse=True,
    )
    steps = sorted((before, after) for _, before, after in falls[:STEPS])
    yield from prose(
        f"A product of {ROWS} x {DEPTH} by {DEPTH} x N in bfloat16 on {processors} multiprocessors. Kernels that reach"
        " the peak use tiles of 128 x 256, 256 x 128 or 128 x 128; a tile that is cut by the edge costs as much as a"
        f" whole one. A wave of the larger ones takes {seconds(2 * 128 * 256 * DEPTH * processors / rate)}, with all"
        f" multiprocessors busy or with one of them, and any product {seconds(start)} besides, as one of 1 x 1 does."
    )
    yield Table(
        title="Before and after each step",
        headers=("N", "tile", "tiles", "waves", "last wave", "share of peak", "predicted"),
        align="rlrrrrr",
        rows=tuple(
            (
                f"{columns}",
                f"{found[columns].tile[0]} x {found[columns].tile[1]}",
                f"{found[columns].tiles}",
                f"{found[columns].waves}",
                percent(found[columns].last_wave, 0),
                percent(found[columns].efficiency, 0),
                seconds(predicted[columns]),
            )
            for pair in steps
            for columns in pair
        ),
        note="The tiles are those of the three that leave the largest share of the peak.",
    )
    # Libraries may share the last tiles between processors, or take tiles of other sizes: faster than the step.
    band = (0.6, 1.25)
    rows = {
        columns: here.row(
            f"N = {columns}",
            torch.mm,
            *factors(columns, here.tensors),
            predicted=predicted[columns],
            band=band,
            max_seconds=0.2,
        )
        for pair in steps
        for columns in pair
    }
    yield compared("Time of the product", list(rows.values()))
    yield from _pictures(here, "N", [(c, predicted[c], 2 * ROWS * DEPTH * c) for c in sizes], rows)
    before, after = steps[0]
    yield from _said(f"N = {before}", f"N = {after}", rows[before], rows[after], after / before)


def _chunks(here: Here) -> Iterator[Part]:
    cores = torch.get_num_threads() if here.measures else here.machine.processors or 1
    a, b = (torch.randn(CHUNK, CHUNK, device=here.tensors) for _ in range(2))
    chunk = here.predict(torch.mm, a, b) * cores  # predicted for all of them: one alone takes as many times as long
    counts = range(1, WAVES * cores + 1)
    predicted = {count: math.ceil(count / cores) * chunk for count in counts}
    yield from prose(
        f"A chunk of work is a product of two {CHUNK} x {CHUNK} matrices on one core, expected to take"
        f" {seconds(chunk)} here. {cores} threads take chunks until there are none left; with a chunk more than a"
        f" multiple of {cores}, all but one wait for the last."
    )
    measured = sorted({1, *(k * cores for k in range(1, WAVES)), *(k * cores + 1 for k in range(1, WAVES))})
    rows: dict[int, Row] = {}
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def work(count: int) -> None:
                for done in [pool.submit(torch.mm, a, b) for _ in range(count)]:
                    done.result()

            for count in measured:
                rows[count] = here.row(f"chunks: {count}", work, count, predicted=predicted[count], cache="hot")
    finally:
        torch.set_num_threads(threads)
    yield compared("Time of all chunks", list(rows.values()))
    yield from _pictures(here, "chunks", [(c, predicted[c], 2 * CHUNK**3 * c) for c in counts], rows)
    last = (WAVES - 1) * cores
    yield from _said(f"{last} chunks", f"{last + 1} chunks", rows[last], rows[last + 1], (last + 1) / last)


def _pictures(
    here: Here, name: str, points: Sequence[tuple[int, float, float]], rows: dict[int, Row]
) -> Iterator[Part]:
    """Time in steps, and the rate as a saw-tooth."""
    flops = {size: count for size, _, count in points}
    taken = [(size, row.measured) for size, row in rows.items() if row.measured]
    few = len(points) <= MARKED  # lines between few points slope where there are steps, so the points are marked
    times = [Series(name="predicted", points=tuple((size, time) for size, time, _ in points), markers=few)]
    rates = [Series(name="predicted", points=tuple((s, count / time) for s, time, count in points), markers=few)]
    if here.measures:
        times.append(Series(name="measured", points=tuple(taken), line=False))
        rates.append(Series(name="measured", points=tuple((s, flops[s] / time) for s, time in taken), line=False))
    yield Plot(title="Time in steps", series=tuple(times), x_label=name, y_label="time")
    yield Plot(title="The saw-tooth", series=tuple(rates), x_label=name, y_label="FLOP/s", y_unit="FLOP/s")


def _said(before: str, after: str, low: Row, high: Row, work: float) -> Iterator[Part]:
    assert low.predicted and high.predicted
    text = (
        f"From {before} to {after} there is {percent(work - 1)} more work, and the time is predicted to grow by"
        f" {percent(high.predicted / low.predicted - 1)}"
    )
    if low.measured and high.measured:
        grown = high.measured / low.measured - 1
        text += f"; measured, it {'grew' if grown > 0 else 'fell'} by {percent(abs(grown))}"
    yield from prose(
        text + ". The way out is to choose sizes that fill the last wave, or to cut the work finer, so that a wave is a"
        " smaller part of the whole."
    )
