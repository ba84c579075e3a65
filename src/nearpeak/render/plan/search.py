"""A search over layouts as a document: the winner, why it wins, and the front of memory against time."""

from __future__ import annotations

from nearpeak.plan.training.choice import SearchPlan
from nearpeak.plan.training.search import Candidate, Reason
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.plan import training as plan_training
from nearpeak.render.plan.layout import degrees, recompute, sharding
from nearpeak.render.plan.memory import gigabytes
from nearpeak.render.plot import Series, line_plot
from nearpeak.units import percent, seconds


def document(answer: SearchPlan, top: int) -> Document:
    """The report."""
    found, cluster = answer.found, answer.cluster
    fact = (
        f"{found.legal:,} legal layouts of {cluster.gpus} x {cluster.machine.name}, {found.fitting:,} fit; "
        f"{answer.global_batch} sequences of {answer.sequence} tokens a step."
    )
    if answer.plan is None or found.best is None:
        short = found.smallest - (cluster.machine.memory_bytes or 0.0)
        text = (
            f"No layout fits: the smallest needs {gigabytes(found.smallest)} GB on a GPU, {gigabytes(short)} GB more "
            "than it has. More GPUs, a shorter sequence, or --offload optimizer with a layout of your own would help."
        )
        return Document(
            title=f"{answer.model.name}: no layout fits", facts=(fact,), parts=(Paragraph(text=text, kind="bad"),)
        )
    inner = plan_training.document(answer.plan)
    return Document(
        title=inner.title,
        facts=(fact, *inner.facts),
        parts=(
            _front(answer, top),
            *_room(answer),
            _reasons(found.reasons),
            *((_conditions(answer),) if answer.conditions else ()),
            *inner.parts,
            Picture(title="Memory against time", svg=front_picture(answer)),
        ),
    )


def _front(answer: SearchPlan, top: int) -> Table:
    found = answer.found
    shown = found.front[:top]
    assert found.best is not None
    rest = len(found.front) - len(shown)
    return Table(
        title="The fastest layout, and those that need less memory",
        headers=("layout", "states", "recompute", "batch", "step", "slower", "GB"),
        rows=tuple(
            (
                degrees(item.layout),
                sharding(item.layout),
                recompute(item.layout).replace("norm+feed_activation", "parts"),
                str(item.layout.microbatch),
                seconds(item.seconds),
                percent(item.seconds / found.best.seconds - 1),
                gigabytes(item.memory),
            )
            for item in shown
        ),
        align="lllrrrr",
        note="batch: sequences of a microbatch. recompute parts: norms and activations of feeds."
        + (f" {rest} more need less memory still: --top {len(found.front)}." if rest else ""),
    )


def _room(answer: SearchPlan) -> tuple[Paragraph, ...]:
    """Which layout to take where the winner leaves no room for fragmentation."""
    best, roomy = answer.found.best, answer.roomy
    if roomy == best or best is None:
        return ()
    if roomy is None:
        return (Paragraph(text="No layout leaves room for the fragmentation that was seen at times.", kind="bad"),)
    layout = roomy.layout
    said = f"{degrees(layout)}, {sharding(layout)}, recompute {recompute(layout)}, microbatch {layout.microbatch}"
    slower = percent(roomy.seconds / best.seconds - 1)
    return (
        Paragraph(
            text=f"The fastest that leaves room for fragmentation: {said}; {seconds(roomy.seconds)} a step, "
            f"{slower} slower, {gigabytes(roomy.memory)} GB."
        ),
    )


def _reasons(reasons: tuple[Reason, ...]) -> Table:
    rows = []
    for reason in reasons:
        other = "-" if reason.other is None else _value(getattr(reason.other.layout, reason.field))
        slower = "-" if reason.slower is None else percent(reason.slower)
        rows.append((reason.field, _value(reason.value), other, slower, reason.because))
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
                degrees(layout) if condition.changed else "the same",
                sharding(layout) if condition.changed else "",
                _value(layout.recompute) if condition.changed else "",
                f"{100 * (condition.tokens_per_second / rate - 1):+.1f} %",
            )
        )
    return Table(
        title="What would change it",
        headers=("with", "winner", "states", "recompute", "tokens/s"),
        rows=tuple(rows),
        align="llllr",
    )


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "full" if "layer" in value else "parts" if value else "none"
    return str(value)


def front_picture(answer: SearchPlan) -> str:
    """The front of time against memory."""

    def point(item: Candidate) -> tuple[float, float]:
        return item.memory / 1e9, item.seconds

    front = answer.found.front
    labels = tuple(
        f"{degrees(item.layout)}, {sharding(item.layout)}, recompute {recompute(item.layout)}" for item in front
    )
    series = [Series(name="nothing is better in both", points=tuple(map(point, front)), labels=labels, colour=0)]
    return line_plot(
        series,
        title=f"{answer.model.name} on {answer.cluster.gpus} x {answer.cluster.machine.name}: memory against time",
        x_label="memory on a GPU, GB",
        y_label="time of a step",
        log_y=True,
        y_format=seconds,
    )
