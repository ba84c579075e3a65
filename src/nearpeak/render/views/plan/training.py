"""Training plans as documents: memory, one layout's step time, and the search over layouts."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.plan.provenance import Provenance
from nearpeak.plan.training.fit import FitPlan
from nearpeak.plan.training.job import Job, Precision
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import StageMemory
from nearpeak.plan.training.plan import MemoryPlan, TrainingPlan
from nearpeak.plan.training.search import Candidate, Reason, SearchPlan
from nearpeak.plan.training.time import TrainingTime
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.picture.bars import Bar, stacked_bars
from nearpeak.render.picture.plot import Series, line_plot
from nearpeak.render.picture.svg import svg
from nearpeak.render.text import signed_percent
from nearpeak.render.views.plan.catalogue import weights
from nearpeak.units import percent, quantity, seconds

_SHARDING = {
    "none": "replicated",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "shard_grad_op": "FSDP without resharding",
    "zero3": "ZeRO-3/FSDP",
    "hsdp": "HSDP",
}


def degrees_text(layout: Layout) -> str:
    """The degrees alone: "tp 4, pp 4 x 5, dp 4"."""
    parts = []
    for name, value in (("tp", layout.tp), ("cp", layout.cp)):
        if value > 1:
            parts.append(f"{name} {value}")
    if layout.pp > 1:
        parts.append(f"pp {layout.pp}" + (f" x {layout.virtual}" if layout.virtual > 1 else ""))
    if layout.ep > 1:
        parts.append(f"ep {layout.ep}" + (f" x etp {layout.etp}" if layout.etp > 1 else ""))
    parts.append(f"dp {layout.dp}")
    return ", ".join(parts)


def sharding_text(layout: Layout) -> str:
    """How states are spread: "ZeRO-1"."""
    name = _SHARDING[layout.sharding]
    return f"{name} in groups of {layout.shard_group}" if layout.sharding == "hsdp" and layout.shard_group else name


def recompute_text(layout: Layout) -> str:
    """What is computed again: "none", "full", or the modules."""
    return "full" if "layer" in layout.recompute else "+".join(layout.recompute) or "none"


def schedule_text(layout: Layout) -> str:
    """The degrees, and what is unusual in the schedule: "tp 4, pp 4, dp 4, zero-bubble"."""
    parts = [degrees_text(layout)]
    if layout.schedule not in ("1f1b", "interleaved"):
        parts.append(layout.schedule)
    if layout.overlap_experts:
        parts.append("experts overlapped")
    return ", ".join(parts)


def layout_text(job: Job) -> str:
    """The whole layout on one line."""
    layout = job.layout
    parts = [
        f"{layout.gpus} GPU{'s' if layout.gpus > 1 else ''}: {degrees_text(layout)}",
        sharding_text(layout),
        f"recompute {recompute_text(layout)}",
        f"microbatch {layout.microbatch} x {job.sequence} tokens",
        f"{layout.microbatches} per step" if layout.microbatches > 1 else "one per step",
    ]
    if layout.schedule != "1f1b":
        parts.append(layout.schedule)
    if layout.overlap_experts:
        parts.append("experts overlapped")
    if layout.offload != "none":
        parts.append(f"{layout.offload} in host memory")
    return ", ".join(parts)


MOST_STAGES = 16


def memory_document(plan: MemoryPlan) -> Document:
    """The report."""
    name = plan.job.model.name
    return Document(
        title=f"Memory to train {name}: {gigabytes(plan.fullest.total)} GB on each GPU"
        + (", which does not fit" if plan.fits is False else ""),
        facts=(states_sentence(plan), _weights_sentence(plan), f"{layout_text(plan.job)}."),
        parts=tuple(memory_parts(plan)),
    )


def memory_parts(plan: MemoryPlan) -> Iterator[Paragraph | Table | Picture]:
    """What a report on memory says, also as a part of another one."""
    yield memory_by_part(plan)
    if len(plan.stages) > 1:
        yield memory_by_stage(plan)
    yield memory_verdict(plan)
    if plan.changes:
        yield memory_changes(plan)
    yield Picture(title="Memory of each pipeline stage", svg=memory_picture(plan))


def fit_document(plan: FitPlan) -> Document:
    """The memory of a traced step, and the changes after which it fits."""
    verdict = "fits" if plan.fits else "does not fit"
    shares = [(name, value) for name, value in plan.by_category.items() if value]
    parts: list[Paragraph | Table | Picture] = [
        Table(
            title="Tensors at the fullest op",
            headers=("part", "GB", "share"),
            rows=(
                *((name, gigabytes(value), percent(value / plan.peak)) for name, value in shares),
                ("peak", gigabytes(plan.peak), "100.0 %"),
            ),
            bars=tuple(value / plan.peak for _, value in shares),
            totals=1,
            note=f"At {plan.at}. needed adds workspaces, the allocator's slack and the CUDA context.",
        )
    ]
    if plan.remedies:
        rows = tuple(
            (
                str(remedy),
                gigabytes(remedy.bytes),
                f"{'+' if remedy.added_seconds >= 0 else '-'}{seconds(abs(remedy.added_seconds))}",
                f"{remedy.added_seconds / plan.seconds:+.1%}",
                "same" if remedy.exact else "rounded",
            )
            for remedy in plan.remedies
        )
        parts.append(
            Table(
                title="Changes that make it fit, the least time first",
                headers=("change", "GB", "time", "of a step", "numbers"),
                rows=rows,
                align="lrrrl",
                note="recompute: torch.utils.checkpoint around so many layers. microbatches: the batch in so many "
                "parts, gradients summed. 8-bit states round the moments of the optimizer.",
            )
        )
    elif not plan.fits:
        parts.append(
            Paragraph(
                text="Nothing that was tried makes it fit: recomputed layers, smaller microbatches, 8-bit or offloaded "
                "optimizer states, sharding over the GPUs. Name more GPUs with --on."
            )
        )
    layers = f"{plan.layers} numbered layers" if plan.layers else "no numbered layers to recompute"
    batch = f"batch {plan.batch}" if plan.batch else "no batch size in common"
    return Document(
        title=f"{plan.source} {verdict} on {plan.machine}: {gigabytes(plan.needed)} GB needed of "
        f"{gigabytes(plan.capacity)}",
        facts=(f"A step of {seconds(plan.seconds)} at the speed of good kernels; {layers}, {batch}.",),
        parts=tuple(parts),
    )


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


def _weights_sentence(plan: MemoryPlan) -> str:
    active = f" ({weights(plan.active_parameters)} active)" if plan.job.model.is_moe else ""
    precision = plan.job.precision
    return f"{weights(plan.parameters)} weights{active} in {precision.name}: {bytes_a_weight(precision)}."


def bytes_a_weight(precision: Precision) -> str:
    """ "2 + 2 + 8 bytes a weight (parameters, gradients, moments)"."""
    sizes = [("parameters", precision.parameters), ("gradients", precision.gradients)]
    sizes += [("float32 copy", precision.master)] if precision.master else []
    sizes += [("AdamW's moments", precision.moments)]
    return f"{' + '.join(f'{size:g}' for _, size in sizes)} bytes a weight ({', '.join(name for name, _ in sizes)})"


def memory_by_part(plan: MemoryPlan) -> Table:
    """One row per part of the fullest stage."""
    stage = plan.fullest
    rows = [*_stage_parts(stage)]
    biggest = stage.total
    return Table(
        title=f"Stage {stage.stage + 1} of {len(plan.stages)}, the fullest" if len(plan.stages) > 1 else "",
        headers=("part", "GB", "share"),
        rows=tuple((name, gigabytes(value), f"{value / biggest:.1%}") for name, value in [*rows, *_stage_sums(stage)]),
        bars=tuple(value / biggest for _, value in rows),
        totals=3,
        note="allocated and reserved are what torch.cuda.max_memory_allocated and _reserved would say; "
        "needed adds what is outside of torch.",
    )


def _stage_parts(stage: StageMemory) -> Iterator[tuple[str, float]]:
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


def _stage_sums(stage: StageMemory) -> Iterator[tuple[str, float]]:
    yield "allocated", stage.allocated
    yield "reserved", stage.reserved
    yield "needed", stage.total


def memory_by_stage(plan: MemoryPlan) -> Table:
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


def memory_verdict(plan: MemoryPlan) -> Paragraph:
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


def memory_changes(plan: MemoryPlan) -> Table:
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


def memory_picture(plan: MemoryPlan) -> str:
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
            subtitle=layout_text(plan.job),
            shown=lambda value: f"{gigabytes(value)} GB",
            limit=plan.capacity,
            limit_name="" if plan.capacity is None else f"{plan.machine}: {gigabytes(plan.capacity)} GB",
        )
    )


MEANINGS = {
    "GEMMs": "forward and backward",
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


def training_document(plan: TrainingPlan) -> Document:
    """The report."""
    time = plan.time
    return Document(
        title=f"Training {plan.job.model.name} on {plan.cluster.gpus} x {plan.cluster.machine.name}: "
        f"{seconds(time.seconds)} a step, MFU {percent(time.mfu)}" + ("" if plan.memory.fits else ", but does not fit"),
        facts=(
            f"{layout_text(plan.job)}.",
            f"{plan.job.precision.name}, {plan.job.software} software of {plan.job.year:g}.",
            *([f"Measured: {plan.calibration.text}."] if plan.calibration is not None else []),
        ),
        parts=(
            time_by_part(time),
            rates_table(plan),
            error_bar(plan),
            *memory_summary(plan),
            Picture(title="Where a step goes", svg=step_picture(plan)),
            Picture(title="Memory of each pipeline stage", svg=memory_picture(plan.memory)),
        ),
    )


def time_by_part(time: TrainingTime) -> Table:
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


def rates_table(plan: TrainingPlan) -> Table:
    """Tokens, utilization, cost and energy."""
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
    dtype = plan.job.precision.gemm_dtype
    note = (
        f"MFU: 3 x forward FLOPs, causal attention counted under its mask, over the dense {dtype} peak of "
        f"{quantity(time.peak, 'FLOP/s')}. HFU adds what is computed again."
    )
    if plan.joules_per_million_tokens is not None:
        watts = plan.cluster.machine.power_watts
        note += f" Energy: GPUs at their board power of {watts:.0f} W, without hosts and cooling."
    return Table(title="Rates", headers=("what", "value"), rows=tuple(rows), align="ll", note=note)


def error_bar(plan: TrainingPlan) -> Paragraph:
    """The error bar and the weakest source."""
    return Paragraph(
        text=f"Range: {percent(plan.error.low - 1)} to +{percent(plan.error.high - 1)}, where eight of ten of "
        f"{plan.error.rows} published runs of {plan.error.like} lay, each source left out in turn (mean error "
        f"{percent(plan.error.error)})."
        + ("" if plan.error.seen else " Wider: no run is on this architecture.")
        + f" {weakest_sentence(plan.provenance)}",
        kind="small",
    )


def weakest_sentence(provenance: Provenance) -> str:
    """Where the weakest figure of an answer comes from."""
    text = provenance.text
    kind = "" if text.startswith(provenance.kind) else f"{provenance.kind}: "
    return f"Weakest figure used: {kind}{text}."


def memory_summary(plan: TrainingPlan) -> Iterator[Paragraph | Table]:
    """Memory in short, and in full where it does not fit."""
    memory, full = plan.memory, memory_by_part(plan.memory)
    yield Paragraph(text=f"Memory: {states_sentence(memory)}")
    yield Table(
        title="Memory on each GPU" + (f", {full.title.lower()}" if full.title else ""),
        headers=full.headers,
        rows=full.rows,
        bars=full.bars,
        totals=full.totals,
        note=full.note,
    )
    if len(memory.stages) > 1:
        yield memory_by_stage(memory)
    yield memory_verdict(memory)
    if memory.changes:
        yield memory_changes(memory)


def step_picture(plan: TrainingPlan) -> str:
    """The step as one stacked bar, and hidden communication as another."""
    return steps_picture(
        [(f"step, {seconds(plan.time.seconds)}", plan.time)], plan.job.model.name, layout_text(plan.job)
    )


def steps_picture(times: list[tuple[str, TrainingTime]], model: str, subtitle: str) -> str:
    """Steps of one or more layouts as stacked bars of the same six groups."""
    groups = {
        "GEMMs, attention": ("GEMMs", "attention"),
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


def search_document(answer: SearchPlan, top: int = 5) -> Document:
    """The report, with the `top` layouts."""
    search, cluster = answer.search, answer.cluster
    fact = (
        f"{search.legal:,} legal layouts of {cluster.gpus} x {cluster.machine.name}: {search.computed:,} were timed, "
        f"bounds show that the others are no better. {answer.global_batch} sequences of {answer.sequence} tokens a "
        f"step. Pipelines: {', '.join(answer.schedules)}"
        + (
            f"; overlapped experts {'tried' if answer.overlap_experts else 'not tried'}."
            if answer.model.is_moe
            else "."
        )
    )
    if answer.plan is None or search.best is None:
        short = search.smallest - (cluster.machine.memory_bytes or 0.0)
        text = (
            f"No layout fits: the smallest needs {gigabytes(search.smallest)} GB on a GPU, {gigabytes(short)} GB more "
            "than it has. More GPUs, a shorter sequence, or --offload optimizer with a layout of your own would help."
        )
        return Document(
            title=f"{answer.model.name}: no layout fits", facts=(fact,), parts=(Paragraph(text=text, kind="bad"),)
        )
    inner = training_document(answer.plan)
    return Document(
        title=inner.title,
        facts=(fact, *inner.facts),
        parts=(
            _front(answer, top),
            *_headroom(answer),
            _reasons(search.reasons),
            *((_conditions(answer),) if answer.conditions else ()),
            *inner.parts,
            Picture(title="Memory against time", svg=front_picture(answer)),
        ),
    )


def _front(answer: SearchPlan, top: int) -> Table:
    search = answer.search
    shown = search.front[:top]
    assert search.best is not None
    rest = len(search.front) - len(shown)
    return Table(
        title="The fastest layout, and those that need less memory",
        headers=("layout", "states", "recompute", "batch", "step", "slower", "GB"),
        rows=tuple(
            (
                schedule_text(item.layout),
                sharding_text(item.layout),
                recompute_text(item.layout).replace("norm+feed_activation", "parts"),
                str(item.layout.microbatch),
                seconds(item.seconds),
                percent(item.seconds / search.best.seconds - 1),
                gigabytes(item.memory),
            )
            for item in shown
        ),
        align="lllrrrr",
        note="batch: sequences of a microbatch. recompute parts: norms and activations of feeds."
        + (f" {rest} more need less memory still: --top {len(search.front)}." if rest else ""),
    )


def _headroom(answer: SearchPlan) -> tuple[Paragraph, ...]:
    """Which layout to take where the winner leaves no room for fragmentation."""
    best, with_margin = answer.search.best, answer.with_margin
    if with_margin == best or best is None:
        return ()
    if with_margin is None:
        return (Paragraph(text="No layout leaves room for the fragmentation that was seen at times.", kind="bad"),)
    layout = with_margin.layout
    described = (
        f"{schedule_text(layout)}, {sharding_text(layout)}, recompute {recompute_text(layout)}, "
        f"microbatch {layout.microbatch}"
    )
    slower = percent(with_margin.seconds / best.seconds - 1)
    return (
        Paragraph(
            text=f"The fastest that leaves room for fragmentation: {described}; {seconds(with_margin.seconds)} a step, "
            f"{slower} slower, {gigabytes(with_margin.memory)} GB."
        ),
    )


def _reasons(reasons: tuple[Reason, ...]) -> Table:
    rows = []
    for reason in reasons:
        next_value = "-" if reason.other is None else _field_text(getattr(reason.other.layout, reason.field))
        slower = "-" if reason.slower is None else percent(reason.slower)
        rows.append((reason.field.replace("_", " "), _field_text(reason.value), next_value, slower, reason.because))
    return Table(
        title="Why it wins: the best layout with another value of each",
        headers=("field", "here", "next", "slower", "because"),
        rows=tuple(rows),
        align="lllrl",
    )


def _conditions(answer: SearchPlan) -> Table:
    assert answer.plan is not None
    rate = answer.plan.time.tokens_per_second
    rows = []
    for condition in answer.conditions:
        layout = condition.layout
        if layout is None:
            rows.append((condition.what, "nothing fits", "-", "-", "-"))
            continue
        rows.append(
            (
                condition.what,
                schedule_text(layout) if condition.changed else "the same",
                sharding_text(layout) if condition.changed else "",
                _field_text(layout.recompute) if condition.changed else "",
                signed_percent(condition.tokens_per_second / rate - 1),
            )
        )
    return Table(
        title="What would change it",
        headers=("with", "winner", "states", "recompute", "tokens/s"),
        rows=tuple(rows),
        align="llllr",
    )


def _field_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "full" if "layer" in value else "parts" if value else "none"
    return str(value)


def front_picture(answer: SearchPlan) -> str:
    """The front of time against memory."""

    def point(item: Candidate) -> tuple[float, float]:
        return item.memory / 1e9, item.seconds

    front = answer.search.front
    labels = tuple(
        f"{schedule_text(item.layout)}, {sharding_text(item.layout)}, recompute {recompute_text(item.layout)}"
        for item in front
    )
    series = [Series(name="nothing is better in both", points=tuple(map(point, front)), labels=labels, color=0)]
    return line_plot(
        series,
        title=f"{answer.model.name} on {answer.cluster.gpus} x {answer.cluster.machine.name}: memory against time",
        x_label="memory on a GPU, GB",
        y_label="time of a step",
        log_y=True,
        y_format=seconds,
    )
