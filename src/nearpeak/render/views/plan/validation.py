"""A validation as a document: errors by source, architecture, GPU and scale, and the worst rows with the reason."""

from __future__ import annotations

from collections.abc import Callable

from nearpeak.plan.validation.errors import ComparedRow, ErrorGroup, Validation
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.picture.plot import Series, line_plot
from nearpeak.render.text import signed_percent
from nearpeak.units import percent, quantity, significant

MOST_GROUPS = 24
MOST_SKIPPED = 6
UNITS = {"s": "seconds", "B": "bytes", "tokens/s": "tokens per second", "": "ratio of speeds"}


def document(validation: Validation) -> Document:
    """The report."""
    rows = sum(group.rows for group in validation.whole)
    how = (
        "Each source was predicted by constants that were fitted without it."
        if validation.left_out
        else "Constants were fitted on these sources among others: errors on new ones are larger."
    )
    parts: list[Paragraph | Table | Picture] = [_table("All rows", validation.whole)]
    if validation.right is not None:
        parts.append(Paragraph(text=_winners(validation)))
    for name, groups in validation.by.items():
        if len(groups) > 1 or name == "source":
            parts.append(_table(f"By {name}", groups))
    if validation.worst:
        parts.append(_worst(validation))
    if validation.skipped:
        parts.append(_skipped(validation))
    parts += [Picture(title=f"Predicted against measured, {name}", svg=image) for name, image in pictures(validation)]
    return Document(
        title=f"{validation.kind}: {rows} measurements against the planner",
        facts=(how,),
        parts=tuple(parts),
    )


def _winners(validation: Validation) -> str:
    counts = []
    for kind in dict.fromkeys(row.source for row in validation.rows):
        rows = [row for row in validation.rows if row.source == kind]
        counts.append(f"{sum((row.measured > 1) == (row.predicted > 1) for row in rows)} of {len(rows)} for {kind}")
    share = percent(validation.right)
    return f"Winner predicted in {share} of the pairs that differ by more than 5 %: {', '.join(counts)}."


def _table(title: str, groups: tuple[ErrorGroup, ...]) -> Table:
    shown = groups[:MOST_GROUPS]
    return Table(
        title=title,
        headers=("group", "rows", "mean", "median", "bias", "worst"),
        rows=tuple(
            (
                group.name,
                str(group.rows),
                percent(group.mean_absolute),
                percent(group.median_absolute),
                signed_percent(group.mean),
                signed_percent(group.worst),
            )
            for group in shown
        ),
        note=(
            (
                "mean, median: of the absolute error; bias: the mean error, above 0 where predictions are too large."
                if title == "All rows"
                else ""
            )
            + (f" {len(groups) - len(shown)} smaller groups are left out." if len(groups) > len(shown) else "")
        ).strip(),
    )


def _worst(validation: Validation) -> Table:
    return Table(
        title="The rows that are furthest off, and what the prediction is made of",
        headers=("row", "what", "measured", "predicted", "error", "about"),
        rows=tuple(
            (
                row.id,
                row.what,
                _value(row.measured, row),
                _value(row.predicted, row),
                signed_percent(row.error),
                ": ".join(part for part in (row.about, row.why) if part),
            )
            for row in validation.worst
        ),
        align="llrrrl",
        below=5,
    )


def _skipped(validation: Validation) -> Table:
    reasons: dict[str, list[str]] = {}
    for name, reason in validation.skipped:
        reasons.setdefault(reason, []).append(name)
    ranked = sorted(reasons.items(), key=lambda item: -len(item[1]))
    rows = [(str(len(names)), names[0], reason) for reason, names in ranked[:MOST_SKIPPED]]
    rest = sum(len(names) for _, names in ranked[MOST_SKIPPED:])
    return Table(
        title=f"{len(validation.skipped)} rows were not planned",
        headers=("rows", "first", "reason"),
        rows=tuple(rows),
        align="rll",
        note=f"{rest} more for other reasons." if rest else "",
    )


def _value(value: float, row: ComparedRow) -> str:
    return significant(value) if not row.unit else quantity(value, row.unit)


def _written(unit: str) -> Callable[[float], str]:
    return lambda value: quantity(value, unit) if unit else significant(value)


def pictures(validation: Validation) -> list[tuple[str, str]]:
    """Predicted against measured, by source, one picture for each unit."""
    plots = []
    for unit in dict.fromkeys(row.unit for row in validation.rows):
        rows = [row for row in validation.rows if row.unit == unit]
        sources = sorted({row.source for row in rows}, key=lambda name: -sum(row.source == name for row in rows))
        series = [
            Series(
                name=source,
                points=tuple((row.measured, row.predicted) for row in rows if row.source == source),
                labels=tuple(
                    f"{row.id}, {row.about}: {signed_percent(row.error)}" for row in rows if row.source == source
                ),
                line=False,
                color=number,
            )
            for number, source in enumerate(sources)
        ]
        ends = [min(row.measured for row in rows), max(row.measured for row in rows)]
        series.append(
            Series(name="equal", points=tuple((end, end) for end in ends), markers=False, dashed=True, color=5)
        )
        plots.append(
            (
                UNITS.get(unit, unit),
                line_plot(
                    series,
                    title=f"Predicted against measured {UNITS.get(unit, unit)}",
                    x_label="measured",
                    y_label="predicted",
                    log_x=True,
                    log_y=True,
                    x_format=_written(unit),
                    y_format=_written(unit),
                ),
            )
        )
    return plots
