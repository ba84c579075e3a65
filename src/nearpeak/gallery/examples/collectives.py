"""Collectives: what they do to data, what they cost on three kinds of wire, and what training pays.

GPUs that train one model together exchange data by a handful of collectives. Each is drawn here as what four ranks hold
before and after it, priced on PCIe, on NVLink and on a network, and then run for real by two processes of this machine,
whose results are checked against the drawings. Data-parallel and fully sharded training are sums of these prices.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from nearpeak import plan
from nearpeak.comm.result import CommRun, load_run
from nearpeak.errors import FileProblem
from nearpeak.gallery.parts import Drawing, Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import RANKS_TIMEOUT_S, Context, run_two
from nearpeak.plan.models.model import forward_flops
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.render.picture.scene import Line, Polygon, Scene, Shape, Text
from nearpeak.render.picture.svg import svg
from nearpeak.units import quantity, seconds

OPS = {
    "broadcast": "every rank gets what one has",
    "all_reduce": "every rank gets the sum of what all have",
    "reduce_scatter": "every rank gets its part of the sum",
    "all_gather": "every rank gets the parts of all",
    "all_to_all": "every rank gets one part from each: a transposition",
}
SIZE = 8 * 2**20
"""Bytes of a collective between the two processes."""
SMALL = 1024
REPEATS = 9
Block = tuple[tuple[int, int], ...]
"""The sum of pieces, each a (rank, piece) of before; () is an empty place."""


def example(context: Context) -> Iterator[Part]:
    """Drawings, prices, training, and two processes."""
    for op, does in OPS.items():
        yield draw_collective(op, does)
    yield from prose(
        "A color is the rank that a block comes from, and a block of four stripes is the sum of four. An all-reduce"
        " is a reduce-scatter followed by an all-gather; that is why the sharded forms of training cost no more bytes"
        " for gradients than the plain one."
    )
    own = context.cluster(64)
    linked = own if own.fabric == "switch" else plan.Cluster.of("h100-sxm", gpus=64)
    node = plan.Cluster.of(linked.machine, gpus=8)
    wires = [("PCIe", plan.Cluster.of("l40s x 8"), 8), ("NVLink", node, 8), ("network", linked, 1)]
    yield from _prices(wires)
    yield from _training(wires)
    yield from _for_real(context)


def draw_collective(op: str, does: str) -> Drawing:
    """Four ranks as rows of four places, before and after."""
    ranks, side, left, top = 4, 34.0, 28.0, 66.0
    name = op.replace("_", "-")
    shapes: list[Shape] = [Text(x=left, y=28, text=f"{name}: {does}", size=15, bold=True)]
    middle = left + 76 + ranks * (side + 6)
    for title, start, held in (
        ("before", left, blocks_before(op, ranks)),
        ("after", middle + 60, blocks_after(op, ranks)),
    ):
        shapes.append(Text(x=start + 60, y=top - 12, text=title, color="muted"))
        for rank, blocks in enumerate(held):
            row = top + rank * (side + 6)
            shapes.append(Text(x=start, y=row + 22, text=f"rank {rank}", color="muted"))
            for place, block in enumerate(blocks):
                shapes += _draw_block(block, start + 60 + place * (side + 6), row, side)
    height = top + ranks * (side + 6)
    arrow = (top + height) / 2 - 3
    shapes.append(Line(points=((middle - 4, arrow), (middle + 34, arrow)), stroke="ink", width=2))
    tip = ((middle + 44, arrow), (middle + 32, arrow - 6), (middle + 32, arrow + 6))
    shapes.append(Polygon(points=tip, fill="ink"))
    scene = Scene(width=560, height=int(height + 14), described=f"{name}: {does}", shapes=tuple(shapes))
    return Drawing(title=name, described=f"{name}: {does}. Four ranks before and after.", svg=svg(scene))


def _draw_block(block: Block, left: float, top: float, side: float) -> Iterator[Shape]:
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


def blocks_before(op: str, ranks: int) -> list[list[Block]]:
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


def blocks_after(op: str, ranks: int) -> list[list[Block]]:
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


def _seconds(op: str, size: float, wire: tuple[str, plan.Cluster, int]) -> float:
    """Over 8 GPUs; over the network each is in another node, where 8 such groups share the adapters."""
    _, cluster, inside = wire
    groups = 1 if inside == 8 else cluster.gpus_per_node
    collective = plan.collective_seconds(op, size, 8, cluster, ranks_per_node=inside, concurrent_groups=groups)
    return collective.seconds


def _prices(wires: list[tuple[str, plan.Cluster, int]]) -> Iterator[Part]:
    large = 2.0**28
    yield Table(
        title="256 MiB over 8 GPUs, predicted",
        headers=("", *(name for name, _, _ in wires)),
        rows=tuple((op, *(seconds(_seconds(op, large, wire)) for wire in wires)) for op in OPS),
        note="; ".join(f"{name}: {_described(cluster, inside)}" for name, cluster, inside in wires) + ".",
    )
    sizes = [2.0**power for power in range(10, 31, 2)]
    yield Plot(
        title="An all-reduce over 8 GPUs",
        series=tuple(
            Series(name=wire[0], points=tuple((size, _seconds("all_reduce", size, wire)) for size in sizes))
            for wire in wires
        ),
        x_label="bytes",
        y_label="time",
        x_unit="B",
        log_x=True,
        log_y=True,
    )
    small = [_seconds("all_reduce", sizes[0], wire) for wire in wires]
    yield from prose(
        f"Small messages take about the same time whatever their size, {seconds(min(small))} to {seconds(max(small))}"
        f" for {quantity(sizes[0], 'B')}: that is latency. Large ones take bytes over bandwidth. In a ring of n ranks"
        " every rank sends (n - 1) / n of the data for a reduce-scatter or an all-gather, and twice that for an"
        " all-reduce."
    )


def _described(cluster: plan.Cluster, inside: int) -> str:
    if inside == 1:
        return f"{cluster.network_name}, {quantity(cluster.network_bandwidth, 'B/s')} per GPU"
    return f"8 x {cluster.machine.name}, {cluster.link_name}, {quantity(cluster.link_bandwidth, 'B/s')}"


def _training(wires: list[tuple[str, plan.Cluster, int]]) -> Iterator[Part]:
    model = plan.find_model("llama-2-7b")
    size = 2.0 * model.parameters
    layer = size / model.layers
    ways = {  # what a step sends in bfloat16, layer by layer
        "data parallel": ("all_reduce",),
        "ZeRO 1 and 2": ("reduce_scatter", "all_gather"),
        "FSDP (ZeRO 3)": ("all_gather", "all_gather", "reduce_scatter"),
    }
    flops = forward_flops(model, 4096).training
    rows = []
    for name, ops in ways.items():
        sent = sum((2 if op == "all_reduce" else 1) * 7 / 8 * size for op in ops)
        times = [model.layers * sum(_seconds(op, layer, wire) for op in ops) for wire in wires]
        tokens = [time * _peak(cluster) / flops for time, (_, cluster, _) in zip(times, wires, strict=True)]
        shown = (f"{seconds(time)}, {count:.0f}" for time, count in zip(times, tokens, strict=True))
        rows.append((name, quantity(sent, "B"), *shown))
    yield Table(
        title=f"What a step of {model.name} sends on 8 GPUs: bytes of each GPU in a ring, time, and tokens",
        headers=("", "sent", *(name for name, _, _ in wires)),
        rows=tuple(rows),
        note="tokens: of each GPU and step whose products, at the peak of its matrix units, take as long as that; with"
        " more of them, communication can hide behind computation.",
    )
    yield from prose(
        f"The gradients of {model.parameters / 1e9:.2f} billion weights are {quantity(size, 'B')} in bfloat16. Data"
        " parallel sums them once. ZeRO 1 and 2 leave each rank its part of the sum and gather the new weights: the"
        " same bytes. FSDP gathers the weights for the forward and again for the backward pass: half as many again."
    )


def _peak(cluster: plan.Cluster) -> float:
    ceilings = cluster.machine.achievable or cluster.machine.theoretical
    assert ceilings is not None
    return ceilings.peak("bfloat16")


def _for_real(context: Context) -> Iterator[Part]:
    yield from prose(
        "Now for real: two processes of this machine, joined by gloo over the loopback and timed by `nearpeak"
        " comm`, which also checks that both ranks hold what the drawings say. Their wire is the CPU itself, which"
        " copies what is sent, so the bytes of both ranks count. Both send a message to the other, small and"
        f" large, and a copy of {quantity(SIZE, 'B')} to new memory is timed; the collectives of as many bytes are"
        " predicted from these three: messages one after the other times the small one, bytes at the rate of the"
        " large one, and the copies that torch makes. gloo sends each half of an all-reduce in two segments: four"
        " messages. Of an all-gather torch copies the result; a reduce-scatter gloo does not have: it is an"
        " all-reduce of a copy, of which a rank keeps its part. Both ranks may copy at once where cores are free, and"
        " sums come on top, so the band is wide."
    )
    if not context.measures:
        return
    context.progress("two processes")
    run = measure_two()
    if run is None:
        yield from prose(f"The two processes did not finish within {RANKS_TIMEOUT_S:.0f} s here.")
        return
    small, large = (_fastest(run, "send_recv", size) for size in (SMALL, SIZE))
    copy = best_copy(SIZE)
    moved = max(large - small, 0.0) / (2 * SIZE)  # both ranks send
    yield from prose(
        f"A message takes {seconds(small)}, one of {quantity(SIZE, 'B')} {seconds(large)}"
        f" ({quantity(2 * SIZE / large, 'B/s')} of both ranks together), and the copy {seconds(copy)}."
    )
    # By op: messages one after the other, bytes that both ranks send together over the size, and copies of it.
    sends = {
        "broadcast": (1, 1.0, 0),
        "all_reduce": (4, 2.0, 0),
        "reduce_scatter": (4, 2.0, 1),
        "all_gather": (1, 1.0, 1),
        "all_to_all": (1, 1.0, 0),
    }
    rows = [
        Prediction(
            what=op,
            predicted=messages * small + share * SIZE * moved + copies * copy,
            measured=_fastest(run, op, SIZE),
            low=0.4,
            high=2.5,
        )
        for op, (messages, share, copies) in sends.items()
    ]
    all_reduce = _fastest(run, "all_reduce", SMALL)
    rows.append(Prediction(what="all_reduce of 1 kB", predicted=4 * small, measured=all_reduce, low=0.4, high=2.5))
    yield prediction_table("Two processes over gloo", rows)
    wrong = dict.fromkeys(point.op for point in run.wrong_points())
    yield from prose(
        f"The results of all {len(OPS)} were right on both ranks, element by element."
        if not wrong
        else f"Not as the drawings say: {', '.join(wrong)}."
    )


def measure_two() -> CommRun | None:
    """What `nearpeak comm` measures with two ranks; None where they fail or take too long."""
    ops = [word for op in (*OPS, "send_recv") for word in ("--op", op)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "comm.json"
        sizes = ["--bytes", f"{SMALL},{SIZE}", "--max-seconds", "0.3", "--json", str(file)]
        run_two(["nearpeak", "comm", "--ranks", "2", "--backend", "gloo", *ops, *sizes])
        with suppress(FileProblem):
            return load_run(file)
    return None


def _fastest(run: CommRun, op: str, size: int) -> float:
    """The fastest call out of place, or in place where there is no other: other processes can only add time."""
    points = [point for point in run.points if (point.op, point.bytes) == (op, size)]
    return min(min(points, key=lambda point: point.in_place).readings)


def best_copy(size: int) -> float:
    """The fastest of some copies of so many bytes to new memory."""
    source = torch.zeros(size // 4)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        source.clone()
        times.append(time.perf_counter() - start)
    return min(times)
