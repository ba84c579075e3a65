"""Grouped products under skewed routing.

A router sends each token to a few experts, and not to all experts equally often. Padding all experts to the busiest one
makes the products regular, and multiplies many zeros. A grouped product takes the rows of each expert as they are and
loses only the rest of its last tile. Shown for uniform routing and for popularity drawn from Beta(1, 5): tokens of each
expert, rows that are padding by the height of a tile, and the time of both ways, predicted by their tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import nearpeak
from nearpeak import kernels
from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, significant

HEIGHTS = (16, 32, 64, 128, 256)
TILE = (128, 256)
"""Rows and columns of a tile in the grouped product of a GPU."""

TORCH_BAND = (0.8, 1.8)
"""Band of torch's grouped product, whose tiles and order are not known."""


def padded_rows(counts: Sequence[int], height: int) -> int:
    """Rows that are multiplied where each expert has whole tiles of this height."""
    return sum(math.ceil(count / height) * height for count in counts)


def grouped_seconds(context: Context, counts: Sequence[int], depth: int, columns: int, dense: float) -> float:
    """Whole tiles in whole rounds over the processors, each at the rate of the dense product; at least the weights."""
    tiles = padded_rows(counts, TILE[0]) // TILE[0] * math.ceil(columns / TILE[1])
    processors = context.machine.processors or 1
    rounds = math.ceil(tiles / processors) * processors / tiles
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    item = 2
    used = sum(count > 0 for count in counts)
    moved = (sum(counts) * (depth + columns) + used * depth * columns) * item
    by_tiles = dense * padded_rows(counts, TILE[0]) / sum(counts) * rounds
    return max(by_tiles, moved / ceilings.bandwidth)


def one_by_one(counts: Sequence[int], rows: Tensor, weight: Tensor) -> list[Tensor]:
    """A product for each expert that has rows."""
    pieces = rows.split(list(counts))
    return [torch.mm(piece, matrix.T) for piece, matrix in zip(pieces, weight, strict=True) if len(piece)]


def padded(rows: Tensor, weight: Tensor) -> Tensor:
    """One product for all experts, with as many rows for each as the busiest has."""
    return torch.bmm(rows, weight.mT)


def example(context: Context) -> Iterator[Part]:
    """Loads, padding, and times."""
    experts, tokens, top, depth, columns = context.pick(gpu=(128, 4096, 8, 4096, 1536), cpu=(16, 512, 2, 256, 256))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    rows = tokens * top
    draws = {
        "uniform": nearpeak.inputs.routing(tokens, experts, top, device="cpu"),
        "Beta(1, 5)": nearpeak.inputs.routing(tokens, experts, top, distribution="beta", device="cpu"),
    }
    counts = {name: draw.counts.tolist() for name, draw in draws.items()}
    busiest = {name: draw.statistics.busiest_to_mean for name, draw in draws.items()}
    yield from prose(
        f"{tokens} tokens go to {top} of {experts} experts each: {rows} rows, {rows / experts:.0f} for an expert on"
        f" average. The busiest has {busiest['uniform']:.2f} times the average if all are equally popular, and"
        f" {busiest['Beta(1, 5)']:.2f} times if popularity is drawn from Beta(1, 5)."
    )
    ranked = {name: sorted(loads, reverse=True) for name, loads in counts.items()}
    yield Plot(
        title="Rows of each expert, the busiest first",
        series=tuple(
            Series(
                name=name,
                points=tuple((float(place), float(load)) for place, load in enumerate(loads, 1)),
                markers=experts <= 32,
            )
            for name, loads in ranked.items()
        ),
        x_label="place of the expert",
        y_label="rows",
        y_unit="",
    )
    waste = [
        (f"tiles of {height} rows", *(percent(padded_rows(loads, height) / rows - 1) for loads in counts.values()))
        for height in HEIGHTS
    ]
    waste.append(("as many as the busiest", *(percent(ratio - 1) for ratio in busiest.values())))
    yield Table(title="Rows of padding, of those that there are", headers=("", *counts), rows=tuple(waste))
    height = max(height for height in HEIGHTS if 2 * height <= rows // experts)
    shares = [percent(padded_rows(loads, height) / rows - 1) for loads in counts.values()]
    yield from prose(
        "An expert's last tile is about half empty, whatever its load, so that what tiles waste follows from their"
        f" height and from how many experts there are: with tiles of {height} rows it is {shares[0]} for uniform and"
        f" {shares[1]} for skewed routing. Padding to the busiest expert wastes what the skew is."
    )

    weight = torch.randn(experts, columns, depth, dtype=dtype, device=context.tensors) / math.sqrt(depth)
    given = torch.randn(rows, depth, dtype=dtype, device=context.tensors)
    dense = context.predict(torch.mm, given, weight[0].mT)
    grouped, whole, by_torch = [], [], []
    for name, loads in counts.items():
        grouped.append(_grouped(context, f"grouped, {name}", loads, given, weight, dense))
        if context.gpu:
            by_torch.append(_by_torch(context, f"torch._grouped_mm, {name}", loads, given, weight, dense))
        blocks = torch.zeros(experts, max(loads), depth, dtype=dtype, device=context.tensors)
        if context.measures:
            for block, piece in zip(blocks, given.split(loads), strict=True):
                block[: len(piece)] = piece
        whole.append(context.row(f"padded, {name}", padded, blocks, weight))
        del blocks
    note = (
        f"Grouped: tiles of {TILE[0]} x {TILE[1]}, in whole rounds over the processors, each at the rate that is"
        " expected of one dense product of all rows."
        if context.gpu
        else "Grouped: a product for each expert, one after the other, each predicted by itself."
    )
    yield prediction_table("Time of a layer's product", [*grouped, *by_torch, *whole], note=note)
    slower = {"grouped": grouped, **({"torch._grouped_mm": by_torch} if by_torch else {}), "padded": whole}
    said = [f"{way} {significant(_seconds(pair[1]) / _seconds(pair[0]))}" for way, pair in slower.items()]
    yield from prose(
        f"Skewed against uniform, as {'measured' if context.measures else 'predicted'} here, times as long:"
        f" {', '.join(said)}. The operations that are wanted are the same in all of them: a skewed batch costs a"
        " grouped product the rest of some tiles and the wait for the busiest experts, and a padded one all of its"
        " padding."
    )


def _grouped(context: Context, what: str, loads: list[int], given: Tensor, weight: Tensor, dense: float) -> Prediction:
    if not context.gpu:
        return context.row(what, partial(one_by_one, loads), given, weight)
    counts = torch.tensor(loads, device=context.tensors)
    predicted = grouped_seconds(context, loads, given.shape[1], weight.shape[1], dense)
    return context.row(what, kernels.grouped_gemm, given, weight, counts, predicted=predicted)


def _by_torch(context: Context, what: str, loads: list[int], given: Tensor, weight: Tensor, dense: float) -> Prediction:
    """torch's own grouped product, where this torch has one; the same prediction, and less is known of its tiles."""
    predicted = grouped_seconds(context, loads, given.shape[1], weight.shape[1], dense)
    low, high = TORCH_BAND
    grouped_mm = getattr(torch, "_grouped_mm", None)
    if grouped_mm is None or not context.measures:
        return Prediction(what=what, predicted=predicted, measured=None, low=low, high=high)
    ends = torch.tensor(loads, device=context.tensors).cumsum(0).to(torch.int32)
    multiply = partial(grouped_mm, offs=ends)
    return context.row(what, multiply, given, weight.mT, predicted=predicted, band=TORCH_BAND)


def _seconds(row: Prediction) -> float:
    seconds = row.measured or row.predicted
    assert seconds is not None
    return seconds
