"""zeros or empty, nan_to_num or zero_: what a needless fill costs.

A buffer that is about to be overwritten need not be filled. A fill writes every byte once; an operation that looks at
what it replaces, such as nan_to_num, reads every byte too. Neither stands out in a list of operations, since each takes
microseconds; a model of 64 layers pays 64 times per pass. The example prepares the expert buffers of a mixture of
experts in three ways, then explains why nan_to_num_ is less than twice as slow as zero_ although it moves twice the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import nearpeak
from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import MEASURE_SECONDS, Context
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import percent, quantity, seconds, significant

LAYERS = 64
LATE_STORES = (0.5, 3.0)
"""Band on a CPU of an operation in place, whose stores may leave the cache during the next call."""


def zeros(buffers: list[Tensor]) -> list[Tensor]:
    """New zeros for each layer."""
    return [torch.zeros_like(buffer) for buffer in buffers]


def empty(buffers: list[Tensor]) -> list[Tensor]:
    """New memory for each layer, not initialized."""
    return [torch.empty_like(buffer) for buffer in buffers]


def zero_in_place(buffers: list[Tensor]) -> None:
    """Zeros in buffers that exist."""
    for buffer in buffers:
        buffer.zero_()


def clean_in_place(buffers: list[Tensor]) -> None:
    """Zeros in place of NaN."""
    for buffer in buffers:
        buffer.nan_to_num_()


def example(context: Context) -> Iterator[Part]:
    """Bytes, then a pass through all layers, then rates."""
    rows, width = context.pick(gpu=(8192, 1536), cpu=(1024, 384))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    size = rows * width * dtype.itemsize
    buffers = [torch.randn(rows, width, dtype=dtype, device=context.tensors) for _ in range(LAYERS)]
    whole = LAYERS * size
    yield from prose(
        f"A model of {LAYERS} layers has a mixture of experts in each. {rows} routed rows of {width} numbers are the"
        f" output of a layer's grouped product, {quantity(size, 'B')}; the buffers of all layers are"
        f" {quantity(whole, 'B')}. The product writes every row, so that its buffer may hold anything before."
    )
    yield Table(
        title="Bytes of a pass",
        headers=("", "reads", "writes"),
        rows=(
            ("torch.empty", *(quantity(0, "B"),) * 2),
            ("torch.zeros", quantity(0, "B"), quantity(whole, "B")),
            ("zero_ in place", quantity(0, "B"), quantity(whole, "B")),
            ("nan_to_num_", *(quantity(whole, "B"),) * 2),
        ),
    )
    cleaned = _row(context, "nan_to_num_", clean_in_place, buffers, band=context.pick(gpu=None, cpu=LATE_STORES))
    made = _row(context, "torch.zeros", zeros, buffers)
    reused = _row(context, "zero_ in place", zero_in_place, buffers)
    rows_of_pass = [made, reused, cleaned]
    if context.gpu:
        wide = [buffer.view(torch.float32) for buffer in buffers]
        rows_of_pass.append(_row(context, "zero_, as float32", zero_in_place, wide))
    yield prediction_table(
        f"A pass through {LAYERS} layers",
        rows_of_pass,
        note="Predicted from the expected time of torch's kernels, which `nearpeak estimate` prints."
        + context.pick(
            gpu="", cpu=" What one call leaves in the cache is written to memory during the next, which no kernel has."
        ),
    )
    yield from _without_zeros(context, buffers)
    how = "measured" if context.measures else "predicted"
    yield StackedBars(
        title="Time that a pass does not need",
        subtitle=f"{LAYERS} calls, as {how} here; with torch.empty it is zero",
        bars=tuple(Bar(name=row.what, pieces=(("seconds", _seconds(row)),)) for row in rows_of_pass[:3]),
    )
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    product = LAYERS * 2 * rows * width * width / ceilings.peak(str(dtype))
    yield from prose(
        f"torch.zeros in place of torch.empty costs {seconds(_seconds(made))} per pass, and so does zero_ on buffers"
        f" that are reused: {seconds(_seconds(reused))}. The grouped products that overwrite the zeros, with matrices"
        f" of {width} x {width}, take {seconds(product)} at the machine's peak: the zeros add"
        f" {percent(_seconds(made) / product, 0)} to them."
    )
    yield from _rates(context, whole, rows_of_pass)
    yield from prose(
        "Where padding must not hold NaN, write zeros to the padding alone, or once when the buffer is made. After"
        " every call, nan_to_num_ reads and writes all rows for the few that need it."
    )


def _row(
    context: Context,
    what: str,
    fn: Callable[[list[Tensor]], Any],
    buffers: list[Tensor],
    band: tuple[float, float] | None = None,
) -> Prediction:
    """The buffers are bound to the function: as arguments, the zeros in them would be called degenerate inputs."""
    return context.row(what, partial(fn, buffers), predicted=context.predict(fn, buffers), band=band)


def _seconds(row: Prediction) -> float:
    return row.measured or row.predicted or 0.0


def _without_zeros(context: Context, buffers: list[Tensor]) -> Iterator[Part]:
    """torch.empty runs no kernel: its time is that of the host, and is called so."""
    if not context.measures:
        yield from prose("torch.empty asks the allocator for memory and runs no kernel.")
        return
    timing = nearpeak.bench(empty, buffers, on=context.machine, max_seconds=MEASURE_SECONDS, other_kinds=False)
    each = f"{seconds(timing.seconds)} of {timing.kind} time, {seconds(timing.seconds / LAYERS)} per buffer"
    if context.gpu:
        yield from prose(
            f"torch.empty runs no kernel. It takes the GPU no time, and the host {each}: that is the allocator, which"
            " works while the GPU is still busy with earlier kernels."
        )
    else:
        yield from prose(f"torch.empty writes nothing. It takes {each}: that is the allocator.")


def _rates(context: Context, whole: float, passes: list[Prediction]) -> Iterator[Part]:
    """nan_to_num_ against zero_: bytes, rates, and what the rate of a fill depends on."""
    times = {row.what: _seconds(row) for row in passes}
    moved = {what: (2 if what == "nan_to_num_" else 1) * whole for what in times}
    how = "measured" if context.measures else "predicted"
    yield Table(
        title=f"Rates: bytes over time, as {how} here",
        headers=("", "bytes", "rate"),
        rows=tuple((what, quantity(moved[what], "B"), quantity(moved[what] / times[what], "B/s")) for what in times),
    )
    fill, clean = (moved[what] / times[what] for what in ("zero_ in place", "nan_to_num_"))
    ratio = times["nan_to_num_"] / times["zero_ in place"]
    why = (
        f"nan_to_num_ moves 2.0 times the bytes of zero_, and takes {significant(ratio)} times as long: it moves"
        f" {quantity(clean, 'B/s')} where the fill moves {quantity(fill, 'B/s')}, and 2.0 x"
        f" {significant(fill / clean)} = {significant(ratio)}."
    )
    if context.gpu:
        wide = times["zero_, as float32"]
        why += (
            " A thread of torch's fill stores four elements at once, which are 8 bytes of a 16-bit type. The same"
            f" bytes, viewed as float32 and so stored 16 at a time, are filled at {quantity(whole / wide, 'B/s')}:"
            f" {significant(times['zero_ in place'] / wide)} times as fast, and nan_to_num_ takes"
            f" {significant(times['nan_to_num_'] / wide)} times as long as that."
        )
    else:
        why += (
            " A core reads a cache line before it writes to it, unless the store bypasses the cache: then a fill moves"
            " as many bytes as an operation in place."
        )
    yield from prose(why)
