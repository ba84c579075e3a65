"""Memory of a training job as a document: by part, by pipeline stage, whether it fits, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.plan.training.answers import MemoryPlan
from nearpeak.plan.training.job import Precision
from nearpeak.plan.training.memory import StageMemory
from nearpeak.render.bars import Bar, stacked_bars
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.plan.layout import described
from nearpeak.render.svg import svg
from nearpeak.units import quantity, seconds

MOST_STAGES = 16


def document(plan: MemoryPlan) -> Document:
    """The report."""
    name = plan.job.model.name
    return Document(
        title=f"Memory to train {name}: {gigabytes(plan.fullest.total)} GB on each GPU",
        facts=(states_sentence(plan), _weights(plan), f"{described(plan.job)}."),
        parts=tuple(parts(plan)),
    )


def parts(plan: MemoryPlan) -> Iterator[Paragraph | Table | Picture]:
    """What a report on memory says, also as a part of another one."""
    yield by_part(plan)
    if len(plan.stages) > 1:
        yield by_stage(plan)
    yield verdict(plan)
    if plan.changes:
        yield changes(plan)
    yield Picture(title="Memory of each pipeline stage", svg=picture(plan))


def gigabytes(value: float) -> str:
    """As "13.5"; 1 GB is 1e9 bytes."""
    return f"{value / 1e9:.1f}"


def states_sentence(plan: MemoryPlan) -> str:
    """Parameters + gradients + optimizer = states, by the exact number of weights and by the one that a name says."""
    stage = plan.fullest
    exact = _sum(stage.parameters, stage.gradients, stage.optimizer)
    line = f"Parameters + gradients + optimizer: {exact} before activations."
    precision, layout, named = plan.job.precision, plan.job.layout, plan.named_parameters
    if named and layout.gpus == 1 and layout.offload == "none" and plan.job.trainable == 1:
        rounded = [named * size for size in (precision.parameters, precision.gradients, precision.optimizer)]
        line += f" By the size in its name, {named / 1e9:g} B: {_sum(*rounded)}."
    return line


def _sum(*values: float) -> str:
    """ "14 + 14 + 56 = 84 GB": whole numbers where all are."""
    whole = all(abs(value / 1e9 - round(value / 1e9)) < 1e-6 for value in values)
    shown = [f"{value / 1e9:.0f}" if whole else gigabytes(value) for value in (*values, sum(values))]
    return " + ".join(shown[:-1]) + f" = {shown[-1]} GB"


def _weights(plan: MemoryPlan) -> str:
    active = f" ({_billions(plan.active_parameters)} active)" if plan.job.model.is_moe else ""
    precision = plan.job.precision
    return f"{_billions(plan.parameters)} weights{active} in {precision.name}: {bytes_a_weight(precision)}."


def bytes_a_weight(precision: Precision) -> str:
    """ "2 + 2 + 8 bytes a weight (parameters, gradients, moments)"."""
    sizes = [("parameters", precision.parameters), ("gradients", precision.gradients)]
    sizes += [("float32 copy", precision.master)] if precision.master else []
    sizes += [("AdamW's moments", precision.moments)]
    return f"{' + '.join(f'{size:g}' for _, size in sizes)} bytes a weight ({', '.join(name for name, _ in sizes)})"


def _billions(number: float) -> str:
    return quantity(number, "").strip().replace(" G", " B")


def by_part(plan: MemoryPlan) -> Table:
    """One row per part of the fullest stage."""
    stage = plan.fullest
    rows = [*_rows(stage)]
    biggest = stage.total
    return Table(
        title=f"Stage {stage.stage + 1} of {len(plan.stages)}, the fullest" if len(plan.stages) > 1 else "",
        headers=("part", "GB", "share"),
        rows=tuple((name, gigabytes(value), f"{value / biggest:.1%}") for name, value in [*rows, *_sums(stage)]),
        bars=tuple(value / biggest for _, value in rows),
        totals=3,
        note="allocated and reserved are what torch.cuda.max_memory_allocated and _reserved would say; "
        "needed adds what is outside of torch.",
    )


def _rows(stage: StageMemory) -> Iterator[tuple[str, float]]:
    yield "parameters", stage.parameters
    yield "gradients", stage.gradients
    yield "optimizer", stage.optimizer
    for name, value in sorted(stage.activations.items(), key=lambda item: -item[1]):
        if value:
            yield f"activations: {name}", value
    yield "logits and loss", stage.logits
    if stage.recomputed:
        yield "computed again", stage.recomputed
    yield "communication buffers", stage.communication
    yield "workspaces", stage.workspace
    yield "allocator slack", stage.slack
    yield "CUDA context, libraries", stage.context


def _sums(stage: StageMemory) -> Iterator[tuple[str, float]]:
    yield "allocated", stage.allocated
    yield "reserved", stage.reserved
    yield "needed", stage.total


def by_stage(plan: MemoryPlan) -> Table:
    """One row per stage; of many, those in the middle are left out."""
    stages = list(plan.stages)
    left_out = 0
    if len(stages) > MOST_STAGES:
        half = MOST_STAGES // 2
        left_out = len(stages) - 2 * half
        stages = [*stages[:half], *stages[-half:]]
    rows = [
        (
            str(stage.stage + 1),
            gigabytes(stage.states),
            gigabytes(stage.activation),
            gigabytes(stage.logits),
            gigabytes(stage.communication + stage.recomputed + stage.workspace),
            gigabytes(stage.allocated),
            gigabytes(stage.total),
        )
        for stage in stages
    ]
    return Table(
        title="By pipeline stage, GB on each of its GPUs",
        headers=("stage", "states", "activations", "logits", "buffers", "allocated", "needed"),
        rows=tuple(rows),
        align="rrrrrrr",
        note=f"{left_out} stages in the middle are left out." if left_out else "",
    )


def verdict(plan: MemoryPlan) -> Paragraph:
    """Whether it fits."""
    need = plan.fullest.total
    if plan.capacity is None:
        return Paragraph(text='Name a machine to see whether it fits: --on "h100-sxm x 8".', kind="small")
    room = plan.capacity - need
    if room >= 0:
        safe = plan.fullest.safe
        if safe > plan.capacity:
            return Paragraph(
                text=f"Fits barely: {gigabytes(room)} GB of the {gigabytes(plan.capacity)} GB of a {plan.machine} are "
                f"left, and fragmentation was seen to take {gigabytes(safe - need)} GB at times.",
                kind="bad",
            )
        return Paragraph(
            text=f"Fits: {gigabytes(room)} GB of the {gigabytes(plan.capacity)} GB of a {plan.machine} are left.",
            kind="good",
        )
    text = f"Does not fit: {gigabytes(-room)} GB more than the {gigabytes(plan.capacity)} GB of a {plan.machine}."
    if not plan.changes:
        text += " Nothing that was tried helps: sharding, recomputation, smaller pieces, offload, 256 times the GPUs."
    return Paragraph(text=text, kind="bad")


def changes(plan: MemoryPlan) -> Table:
    """What would make it fit."""
    timed = any(change.seconds is not None for change in plan.changes)
    rows = []
    for change in plan.changes:
        time = (seconds(change.seconds),) if timed else ()
        rows.append((change.what, gigabytes(change.total), *time))
    return Table(
        title="The cheapest changes that make it fit",
        headers=("change", "GB", *(("step",) if timed else ())),
        rows=tuple(rows),
    )


def picture(plan: MemoryPlan) -> str:
    """Stages as stacked bars against the memory of a GPU."""
    bars = [
        Bar(
            name=f"stage {stage.stage + 1}" if len(plan.stages) > 1 else "each GPU",
            pieces=(
                ("parameters", stage.parameters),
                ("gradients", stage.gradients),
                ("optimizer", stage.optimizer),
                ("activations", stage.activation + stage.recomputed),
                ("logits", stage.logits),
                ("buffers, context, slack", stage.communication + stage.workspace + stage.slack + stage.context),
            ),
        )
        for stage in plan.stages
    ]
    return svg(
        stacked_bars(
            bars,
            title=f"Memory to train {plan.job.model.name}",
            subtitle=described(plan.job),
            shown=lambda value: f"{gigabytes(value)} GB",
            limit=plan.capacity,
            limit_name="" if plan.capacity is None else f"{plan.machine}: {gigabytes(plan.capacity)} GB",
        )
    )
