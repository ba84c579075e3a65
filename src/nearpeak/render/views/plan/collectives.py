"""Collectives by size as a document: one table for each op, or all ops side by side, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import Collective
from nearpeak.plan.provenance import weakest
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.picture.plot import Series, line_plot
from nearpeak.render.views.plan.training import weakest_sentence
from nearpeak.units import quantity, seconds


def document(collectives: Sequence[Collective], cluster: Cluster, ranks: int) -> Document:
    """The report."""
    ops = list(dict.fromkeys(item.op for item in collectives))
    several = len(ops) > 2
    tables = (_side_by_side(collectives, ops),) if several else tuple(_by_size(collectives, op) for op in ops)
    return Document(
        title=f"Collectives over {ranks} GPUs",
        facts=(str(cluster),),
        parts=(
            *tables,
            *((_algorithms(collectives, ops),) if several else ()),
            Paragraph(text=weakest_sentence(weakest(*(item.provenance for item in collectives))), kind="small"),
            Picture(
                title="Time by size",
                svg=picture(collectives, ops, f"Collectives over {ranks} x {cluster.machine.name}"),
            ),
        ),
    )


def collective_document(collective: Collective) -> Document:
    """One collective."""
    return Document(
        title=f"{collective.op} over {collective.ranks} GPUs",
        parts=(
            replace(_by_size([collective], collective.op), title=""),
            Paragraph(text=weakest_sentence(collective.provenance), kind="small"),
        ),
    )


def _by_size(collectives: Sequence[Collective], op: str) -> Table:
    return Table(
        title=op,
        headers=("bytes", "time", "latency", "wire", "busbw", "algorithm", "limit"),
        rows=tuple(
            (
                size(item.bytes),
                seconds(item.seconds),
                seconds(item.latency_seconds),
                seconds(item.bandwidth_seconds),
                quantity(item.bus_bandwidth, "B/s"),
                ", ".join(filter(None, (item.algorithm, item.protocol))),
                item.limiter,
            )
            for item in collectives
            if item.op == op
        ),
        align="rrrrrll",
        note="busbw: as nccl-tests counts it, the bytes that a ring would put on the wire over the time.",
    )


def _side_by_side(collectives: Sequence[Collective], ops: Sequence[str]) -> Table:
    times = {(item.op, item.bytes): seconds(item.seconds) for item in collectives}
    sizes = list(dict.fromkeys(item.bytes for item in collectives))
    return Table(
        title="Time by size",
        headers=("bytes", *(_short(op) for op in ops)),
        rows=tuple((size(amount), *(times[op, amount] for op in ops)) for amount in sizes),
        align="r" * (len(ops) + 1),
    )


def _algorithms(collectives: Sequence[Collective], ops: Sequence[str]) -> Table:
    rows = []
    for op in ops:
        mine = [item for item in collectives if item.op == op]
        changes: list[str] = []
        before = ""
        for item in mine:
            name = f"{item.algorithm} {item.protocol}".rstrip()
            if name != before:
                changes.append(f"{name} from {size(item.bytes)}" if changes else name)
            before = name
        rows.append((op, f"{mine[-1].limiter}", "; ".join(changes)))
    return Table(
        title="By which algorithm",
        headers=("op", "limit", "algorithm by size"),
        rows=tuple(rows),
        align="lll",
        below=2,
        note="limit: of the largest message.",
    )


def size(value: float) -> str:
    """A message size: "64 MiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale and value % (scale / 4) == 0:
            return f"{value / scale:g} {unit}"
    return f"{value:g} B"


def _short(op: str) -> str:
    return {"reduce_scatter": "red_scat", "broadcast": "bcast", "send_recv": "send"}.get(op, op)


def picture(collectives: Sequence[Collective], ops: Sequence[str], title: str) -> str:
    """Times against sizes, both logarithmic."""
    series = [
        Series(
            name=op,
            points=tuple((item.bytes, item.seconds) for item in collectives if item.op == op and item.seconds),
            labels=tuple(
                f"{op} of {size(item.bytes)}: {seconds(item.seconds)}, {item.algorithm} {item.protocol}"
                for item in collectives
                if item.op == op and item.seconds
            ),
            color=number,
        )
        for number, op in enumerate(ops)
    ]
    amounts = list(dict.fromkeys(item.bytes for item in collectives))
    return line_plot(
        series,
        title=title,
        x_label="bytes",
        y_label="time",
        log_x=True,
        log_y=True,
        x_ticks=[(amount, size(amount)) for amount in amounts],
        y_format=seconds,
    )
