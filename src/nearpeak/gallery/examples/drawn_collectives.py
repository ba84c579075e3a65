"""What collectives do to data, for the example `collectives`: as blocks before and after, and as pictures of them."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.gallery.parts import Drawing
from nearpeak.render.scene import Line, Polygon, Scene, Shape, Text
from nearpeak.render.svg import svg

Block = tuple[tuple[int, int], ...]
"""The sum of pieces, each a (rank, piece) of before; () is an empty place."""


def before(op: str, ranks: int) -> list[list[Block]]:
    """What each rank holds at first, by place."""
    filled: dict[str, list[list[bool]]] = {
        "broadcast": [[rank == 0] * ranks for rank in range(ranks)],
        "all_gather": [[place == rank for place in range(ranks)] for rank in range(ranks)],
    }
    everything = [[True] * ranks for _ in range(ranks)]
    return [
        [((rank, place),) if full else () for place, full in enumerate(row)]
        for rank, row in enumerate(filled.get(op, everything))
    ]


def after(op: str, ranks: int) -> list[list[Block]]:
    """What each rank holds then."""
    sums = [tuple((rank, place) for rank in range(ranks)) for place in range(ranks)]
    places = range(ranks)
    by_rank: dict[str, list[list[Block]]] = {
        "broadcast": [[((0, place),) for place in places] for _ in places],
        "all_reduce": [list(sums) for _ in places],
        "reduce_scatter": [[sums[place] if place == rank else () for place in places] for rank in places],
        "all_gather": [[((place, place),) for place in places] for _ in places],
        "all_to_all": [[((place, rank),) for place in places] for rank in places],
    }
    return by_rank[op]


def drawing(op: str, does: str) -> Drawing:
    """Four ranks as rows of four places, before and after."""
    ranks, side, left, top = 4, 34.0, 28.0, 66.0
    name = op.replace("_", "-")
    shapes: list[Shape] = [Text(x=left, y=28, text=f"{name}: {does}", size=15, bold=True)]
    middle = left + 76 + ranks * (side + 6)
    for title, start, held in (("before", left, before(op, ranks)), ("after", middle + 60, after(op, ranks))):
        shapes.append(Text(x=start + 60, y=top - 12, text=title, colour="muted"))
        for rank, blocks in enumerate(held):
            row = top + rank * (side + 6)
            shapes.append(Text(x=start, y=row + 22, text=f"rank {rank}", colour="muted"))
            for place, block in enumerate(blocks):
                shapes += _block(block, start + 60 + place * (side + 6), row, side)
    height = top + ranks * (side + 6)
    arrow = (top + height) / 2 - 3
    shapes.append(Line(points=((middle - 4, arrow), (middle + 34, arrow)), stroke="ink", width=2))
    tip = ((middle + 44, arrow), (middle + 32, arrow - 6), (middle + 32, arrow + 6))
    shapes.append(Polygon(points=tip, fill="ink"))
    scene = Scene(width=560, height=int(height + 14), described=f"{name}: {does}", shapes=tuple(shapes))
    return Drawing(title=name, described=f"{name}: {does}. Four ranks before and after.", svg=svg(scene))


def _block(block: Block, left: float, top: float, side: float) -> Iterator[Shape]:
    if not block:
        yield Polygon(points=_box(left, top, side, side), fill="page", stroke="faint")
        return
    stripe = side / len(block)
    for number, (rank, _) in enumerate(block):
        yield Polygon(points=_box(left, top + number * stripe, side, stripe), fill=str(rank), opacity=0.75)
    label = "abcd"[block[0][1]]
    yield Text(x=left + side / 2, y=top + side / 2 + 5, text=label, anchor="middle", bold=True, halo=True)


def _box(left: float, top: float, width: float, height: float) -> tuple[tuple[float, float], ...]:
    return ((left, top), (left + width, top), (left + width, top + height), (left, top + height))
