"""Tensor against expert parallelism of an MoE layer as a document and as a picture of two panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.model import Model
from nearpeak.plan.moe_degrees import MoeDegree, crossover
from nearpeak.plan.provenance import weakest
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.html.markup import visible
from nearpeak.render.picture.axis import Axis, trim_zeros
from nearpeak.render.picture.scene import Line, Polygon, Scene, Shape, Text, rectangle
from nearpeak.render.picture.svg import svg
from nearpeak.render.views.plan.training import weakest_sentence
from nearpeak.units import quantity, seconds

NAMES = {"tensor": "Tensor parallel", "expert": "Expert parallel"}
PARTS = (
    ("memory_seconds", "memory", "0"),
    ("compute_seconds", "compute", "1"),
    ("communication_seconds", "communication", "3"),
)
WIDTH, HEIGHT, TOP, BOTTOM = 960, 420, 110, 70
PANEL, GAP, LEFT = 400, 60, 74


def document(degrees: Sequence[MoeDegree], model: Model, cluster: Cluster) -> Document:
    """The report."""
    first = crossover(degrees)
    comparison = (
        f"Expert parallel is the faster of the two from a degree of {first} on."
        if first is not None
        else "Tensor parallel is the faster of the two at the largest degree."
    )
    return Document(
        title=f"The experts of a layer of {model.name}, split two ways",
        facts=(
            f"{model.active_experts} of {model.experts} experts a token, {model.latent or model.hidden} x "
            f"{model.expert_intermediate} each; {degrees[0].tokens} tokens; {cluster}",
        ),
        parts=(
            _times(degrees),
            Paragraph(text=comparison),
            _shapes(degrees),
            Paragraph(text=weakest_sentence(weakest(*(item.provenance for item in degrees))), kind="small"),
            Picture(title="Memory time against compute time by degree", svg=svg(picture(degrees, model, cluster))),
        ),
    )


def _times(degrees: Sequence[MoeDegree]) -> Table:
    return Table(
        title="Time of the busiest GPU, forward",
        headers=("split", "degree", "memory", "compute", "communication", "all", "limit"),
        rows=tuple(
            (
                item.split,
                str(item.degree),
                seconds(item.memory_seconds),
                seconds(item.compute_seconds),
                seconds(item.communication_seconds),
                seconds(item.seconds),
                item.limiter,
            )
            for item in degrees
        ),
        align="lrrrrrl",
        note="all: the larger of memory and compute, and then communication.",
    )


def _shapes(degrees: Sequence[MoeDegree]) -> Table:
    return Table(
        title="Why they differ",
        headers=("split", "degree", "experts", "tokens each", "imbalance", "weights", "activations", "padding"),
        rows=tuple(
            (
                item.split,
                str(item.degree),
                f"{item.experts_hit_per_gpu:.0f}",
                f"{item.tokens_per_expert:.0f}",
                f"{item.imbalance:.2f}",
                quantity(item.weight_bytes, "B"),
                quantity(item.activation_bytes, "B"),
                f"{item.padded_flops / item.flops:.2f}",
            )
            for item in degrees
        ),
        align="lrrrrrrr",
        note="experts: those with tokens, on one GPU. imbalance: tokens of the busiest GPU against the mean. padding: "
        "what matrix units do against what is asked of them.",
    )


def picture(degrees: Sequence[MoeDegree], model: Model, cluster: Cluster) -> Scene:
    """Two panels, one for each way to split, on one scale: bars of memory, compute and communication by degree."""
    longest = max(getattr(item, name) for item in degrees for name, _, _ in PARTS)
    axis = Axis(log=False, low=0.0, high=1.08 * longest, start=HEIGHT - BOTTOM, end=TOP)
    shapes: list[Shape] = [
        Text(
            x=28,
            y=32,
            text=f"The experts of a layer of {visible(model.name, 40)}: tensor against expert parallel",
            size=17,
            bold=True,
        ),
        Text(
            x=28,
            y=54,
            text=f"{degrees[0].tokens} tokens on {visible(cluster.machine.name, 40)}; time of the busiest GPU",
            color="muted",
        ),
    ]
    left = 28.0
    for _, name, color in PARTS:
        shapes.append(Polygon(points=rectangle(left, 66, 12, 12), fill=color, opacity=0.8))
        shapes.append(Text(x=left + 17, y=76, text=name, color="muted"))
        left += 50 + 7 * len(name)
    for number, split in enumerate(("tensor", "expert")):
        items = [item for item in degrees if item.split == split]
        shapes += _panel(items, LEFT + number * (PANEL + GAP), axis, NAMES[split])
    times = "; ".join(f"{item.split} {item.degree}: {seconds(item.seconds)}" for item in degrees)
    return Scene(width=WIDTH, height=HEIGHT, described=f"Time by degree. {times}.", shapes=tuple(shapes))


def _panel(items: Sequence[MoeDegree], left: float, axis: Axis, title: str) -> Iterator[Shape]:
    floor = float(HEIGHT - BOTTOM)
    yield Text(x=left, y=TOP - 12, text=title, bold=True)
    for value in axis.ticks():
        row, _ = axis.place(value)
        yield Line(points=((left, row), (left + PANEL, row)), stroke="faint")
        yield Text(x=left - 6, y=row + 4, text=trim_zeros(seconds(value)), anchor="end", size=11, color="muted")
    room = PANEL / max(1, len(items))
    bar = min(28.0, (room - 12) / len(PARTS))
    for number, item in enumerate(items):
        start = left + room * (number + 0.5) - bar * len(PARTS) / 2
        for part, (field, name, color) in enumerate(PARTS):
            duration: float = getattr(item, field)
            row, _ = axis.place(duration)
            yield Polygon(
                points=rectangle(start + bar * part, row, bar - 2, floor - row),
                fill=color,
                opacity=0.8,
                title=f"{title}, degree {item.degree}, {name}: {seconds(duration)}",
            )
        middle = left + room * (number + 0.5)
        yield Text(x=middle, y=floor + 18, text=str(item.degree), anchor="middle")
        yield Text(x=middle, y=floor + 36, text=seconds(item.seconds), anchor="middle", size=11, color="muted")
    yield Line(points=((left, floor), (left + PANEL, floor)), stroke="ink")
    yield Text(
        x=left + PANEL / 2, y=floor + 56, text="degree, and the time in all", anchor="middle", size=11, color="muted"
    )
