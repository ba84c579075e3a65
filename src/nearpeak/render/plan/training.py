"""A training plan as a document: the step by part, rates, cost, memory, and how far to trust them."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.plan.provenance import Provenance
from nearpeak.plan.training.answers import TrainingPlan
from nearpeak.plan.training.time import TrainingTime
from nearpeak.render.bars import Bar, stacked_bars
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.plan import memory as plan_memory
from nearpeak.render.plan.layout import described
from nearpeak.render.svg import svg
from nearpeak.units import percent, quantity, seconds

MEANINGS = {
    "products": "matrix products",
    "attention": "scores and values",
    "memory-bound": "norms, activations, residuals",
    "casts": "to 8 or 4 bits",
    "recompute": "forward passes run again",
    "launches": "the device waits for the host",
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed exchange of keys and values",
    "experts": "exposed exchange of tokens",
    "pipeline": "exposed sends between stages",
    "bubble": "stages that wait for others",
    "data": "exposed gradients and weights",
    "optimizer": "states read and written",
    "step": "what every step costs",
    "stragglers": "the slowest GPU, contention",
}
"""Each part of a step in a few words."""


def document(plan: TrainingPlan) -> Document:
    """The report."""
    time = plan.time
    return Document(
        title=f"Training {plan.job.model.name} on {plan.cluster.gpus} x {plan.cluster.machine.name}: "
        f"{seconds(time.seconds)} a step, MFU {percent(time.mfu)}",
        facts=(
            f"{described(plan.job)}.",
            f"{plan.job.precision.name}, {plan.job.software} software of {plan.job.year:g}.",
        ),
        parts=(
            by_part(time),
            rates(plan),
            trust(plan),
            *memory_parts(plan),
            Picture(title="Where a step goes", svg=picture(plan)),
            Picture(title="Memory of each pipeline stage", svg=plan_memory.picture(plan.memory)),
        ),
    )


def by_part(time: TrainingTime) -> Table:
    """One row per part; what hides behind it beside."""
    rows, bars = [], []
    for name, value in time.parts.items():
        hidden = time.hidden.get(name, 0.0)
        if value < 5e-5 * time.seconds and hidden < 5e-5 * time.seconds:
            continue
        rows.append(
            (
                name,
                seconds(value),
                percent(value / time.seconds),
                seconds(hidden) if hidden else "-",
                MEANINGS.get(name, ""),
            )
        )
        bars.append(value / time.seconds)
    rows.append(("step", seconds(time.seconds), "100.0 %", seconds(sum(time.hidden.values())), ""))
    rows = [("other" if row[0] == "step" and row[4] else row[0], *row[1:]) for row in rows]
    return Table(
        title="One step",
        headers=("part", "time", "share", "hidden", "meaning"),
        rows=tuple(rows),
        align="lrrrl",
        bars=tuple(bars),
        totals=1,
        note="hidden: communication that passes behind other parts, and is no part of the step.",
    )


def rates(plan: TrainingPlan) -> Table:
    """Tokens, utilisation, cost and energy."""
    time = plan.time
    rows = [
        ("step", f"{seconds(time.seconds)}, between {seconds(plan.low)} and {seconds(plan.high)}"),
        ("tokens of a step", f"{time.tokens:,}"),
        ("tokens/s", f"{time.tokens_per_second:,.0f}"),
        ("tokens/s per GPU", f"{time.tokens_per_second_per_gpu:,.0f}"),
        ("model FLOP/s per GPU", quantity(time.model_flops / time.seconds / time.gpus, "FLOP/s")),
        ("MFU", percent(time.mfu)),
        ("HFU", percent(time.hfu)),
    ]
    if plan.dollars_per_million_tokens is not None:
        rows.append(
            ("cost", f"${plan.dollars_per_million_tokens:.3g} per million tokens at ${plan.price:g} per GPU hour")
        )
    if plan.joules_per_million_tokens is not None:
        rows.append(("energy", f"{plan.joules_per_million_tokens / 3.6e6:.3g} kWh per million tokens"))
    dtype = plan.job.precision.products
    note = (
        f"MFU: 3 x forward FLOPs, causal attention counted under its mask, over the dense {dtype} peak of "
        f"{quantity(time.peak, 'FLOP/s')}. HFU adds what is computed again."
    )
    if plan.joules_per_million_tokens is not None:
        watts = plan.cluster.machine.power_watts
        note += f" Energy: GPUs at their board power of {watts:.0f} W, without hosts and cooling."
    return Table(title="Rates", headers=("what", "value"), rows=tuple(rows), align="ll", note=note)


def trust(plan: TrainingPlan) -> Paragraph:
    """The error bar and the weakest source."""
    return Paragraph(
        text=f"Error bar: {percent(plan.error.error)}, the mean error on {plan.error.rows} published runs of "
        f"{plan.error.like}, each source left out of the fit in turn. {weakest_sentence(plan.provenance)}",
        kind="small",
    )


def weakest_sentence(provenance: Provenance) -> str:
    """Where the weakest figure of an answer comes from."""
    said = provenance.text
    kind = "" if said.startswith(provenance.kind) else f"{provenance.kind}: "
    return f"Weakest figure used: {kind}{said}."


def memory_parts(plan: TrainingPlan) -> Iterator[Paragraph | Table]:
    """Memory in short, and in full where it does not fit."""
    memory, full = plan.memory, plan_memory.by_part(plan.memory)
    yield Paragraph(text=f"Memory: {plan_memory.states_sentence(memory)}")
    yield Table(
        title="Memory on each GPU" + (f", {full.title.lower()}" if full.title else ""),
        headers=full.headers,
        rows=full.rows,
        bars=full.bars,
        totals=full.totals,
        note=full.note,
    )
    if len(memory.stages) > 1:
        yield plan_memory.by_stage(memory)
    yield plan_memory.verdict(memory)
    if memory.changes:
        yield plan_memory.changes(memory)


def picture(plan: TrainingPlan) -> str:
    """The step as one stacked bar, and hidden communication as another."""
    return steps_picture([(f"step, {seconds(plan.time.seconds)}", plan.time)], plan.job.model.name, described(plan.job))


def steps_picture(times: list[tuple[str, TrainingTime]], model: str, subtitle: str) -> str:
    """Steps of one or more layouts as stacked bars of the same six groups."""
    groups = {
        "products, attention": ("products", "attention"),
        "memory-bound, casts, optimizer": ("memory-bound", "casts", "optimizer"),
        "recompute": ("recompute",),
        "communication": ("tensor", "context", "experts", "pipeline", "data"),
        "bubble": ("bubble",),
        "launches, stragglers": ("launches", "step", "stragglers"),
    }
    bars = [
        Bar(
            name=name, pieces=tuple((group, sum(time.parts[part] for part in parts)) for group, parts in groups.items())
        )
        for name, time in times
    ]
    return svg(stacked_bars(bars, title=f"Where a training step of {model} goes", subtitle=subtitle, shown=seconds))
