"""A sweep as a document and as a plot against its bound; and a sweep beside a saved one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from nearpeak.measure.results import BaselineComparison, label
from nearpeak.measure.timing import Sweep, Timing
from nearpeak.render.document import Block, Document, Items, Paragraph, Table
from nearpeak.render.picture.plot import Series, line_plot
from nearpeak.render.text import plain
from nearpeak.render.views.timing import parameters_text, rates
from nearpeak.units import percent, quantity, seconds

SHOWN_POINTS = 4
LOG_SPAN = 8
"""An axis is logarithmic when its values span more than this factor."""

NOT_INTERLEAVED = (
    "NOT INTERLEAVED: the saved run was measured at another time. Heat, clocks and neighbors differ as well as the "
    "code, and an interval covers only its own run: 'apart' is a hint, not a verdict. `nearpeak bench OLD NEW` "
    "compares two cases in interleaved pairs."
)


def document(sweep: Sweep) -> Document:
    """One row per point; points that could not be measured are below, with the reason."""
    varied, fixed = _varied(sweep)
    facts = []
    if sweep.timings:
        device = plain(sweep.timings[0].environment.device, 50) or "an unnamed device"
        kinds = sorted({f"{timing.kind} time, {timing.cache} cache" for timing in sweep.timings})
        facts.append(f"{'; '.join(kinds)}; on {device}")
    if sweep.partial:
        facts.append("PARTIAL: the sweep was interrupted.")
    parts: list[Block] = [_table(sweep, varied)]
    flags, failures = tuple(_flag_counts(sweep)), sweep.failures.items()
    if flags:
        parts.append(Items(items=flags))
    if failures:
        items = tuple(f"{plain(point)}: {plain(reason, 400)}" for point, reason in failures)
        parts.append(Items(title="Not measured:", items=items, marker="  "))
    return Document(
        title=f"{plain(sweep.name, 60)}  {parameters_text(fixed)}".rstrip(), facts=tuple(facts), parts=tuple(parts)
    )


def baseline_document(comparison: BaselineComparison) -> Document:
    """Then and now, with what makes the two hard to compare first."""
    parts: list[Block] = [Paragraph(text=NOT_INTERLEAVED)]
    if comparison.environment:
        parts.append(Items(items=(f"DIFFERENT ENVIRONMENT: {'; '.join(comparison.environment)}.",)))
    shared = _shared([row.new.parameters for row in comparison.rows])
    if shared:
        parts.append(Items(items=(f"all with {parameters_text(shared)}",)))
    rows = tuple(
        (
            plain(label({key: value for key, value in row.new.parameters.items() if key not in shared}), 34) or "-",
            seconds(row.old.seconds, 4),
            seconds(row.new.seconds, 4),
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            f"not comparable: {row.reason}" if row.state == "not comparable" else row.state,
        )
        for row in comparison.rows
    )
    headers = ("point", "then", "now", "now / then", "intervals")
    parts.append(
        Table(headers=headers, rows=rows, align="lrrrl")
        if rows
        else Paragraph(text="The two runs have no point in common.")
    )
    for name, points in (("Only in the saved run", comparison.only_old), ("Only in this run", comparison.only_new)):
        if points:
            names = "; ".join(plain(point, 60) or "no parameters" for point in points[:SHOWN_POINTS])
            more = f"; and {len(points) - SHOWN_POINTS} more" if len(points) > SHOWN_POINTS else ""
            parts.append(Items(items=(f"{name}: {names}{more}.",)))
    return Document(title="Beside the saved run", is_titled=False, parts=tuple(parts))


def svg(sweep: Sweep) -> str:
    """Time per call against the swept parameter, with intervals and the bound; one line per other combination."""
    varied, fixed = _varied(sweep)
    x_name = _x_parameter(varied)
    positions = _positions(varied.get(x_name, ()))
    groups: dict[str, list[Timing]] = {}
    for timing in sweep.timings:
        others = {key: value for key, value in timing.parameters.items() if key in varied and key != x_name}
        groups.setdefault(parameters_text(others), []).append(timing)
    series = []
    for number, (name, timings) in enumerate(groups.items()):
        places = [positions.get(timing.parameters.get(x_name, ""), 1.0) for timing in timings]
        order = sorted(range(len(timings)), key=lambda i: places[i])
        measured = [(places[i], timings[i]) for i in order]
        series.append(
            Series(
                name=name or "measured",
                points=tuple((place, timing.seconds) for place, timing in measured),
                bars=tuple((timing.low, timing.high) for _, timing in measured),
                labels=tuple(f"{parameters_text(timing.parameters)}: {timing}" for _, timing in measured),
                color=number,
            )
        )
        bounds = [(place, timing.bound_seconds) for place, timing in measured if timing.bound_seconds]
        if bounds:
            limiters = sorted({timing.bound_limiter or "" for _, timing in measured if timing.bound_seconds})
            series.append(
                Series(
                    name=f"{name} bound ({', '.join(limiters)})".strip(),
                    points=tuple((place, bound) for place, bound in bounds if bound is not None),
                    markers=len(bounds) == 1,  # one point makes no line
                    dashed=True,
                    color=number,
                )
            )
    numeric = [value for value in positions.values() if value > 0]
    kinds = ", ".join(sorted({timing.kind for timing in sweep.timings}))
    return line_plot(
        series,
        title=f"{sweep.name}  {parameters_text(fixed)}".strip() + (" (partial)" if sweep.partial else ""),
        x_label=x_name or "point",
        y_label=f"{kinds} time per call".strip(),
        log_x=len(numeric) == len(positions) > 0 and max(numeric) > LOG_SPAN * min(numeric),
        log_y=True,
        x_ticks=sorted((place, value) for value, place in positions.items()),
        y_format=seconds,
    )


def _table(sweep: Sweep, varied: Mapping[str, Sequence[str]]) -> Table:
    """The points, without the columns in which nothing is known."""
    headers = [*(plain(key, 16) for key in varied), "time", "+-", "B/s", "FLOP/s", "of bound", "limit", "grade"]
    rows = []
    for timing in sweep.timings:
        moved, computed = rates(timing)
        rows.append(
            (
                *(plain(timing.parameters.get(key, "-"), 16) for key in varied),
                seconds(timing.seconds, 4),
                percent(timing.relative_half_width, 2),
                quantity(moved, "").strip(),
                quantity(computed, "").strip(),
                percent(timing.share_of_bound),
                timing.bound_limiter or "-",
                timing.grade,
            )
        )
    align = "r" * (len(headers) - 2) + "lr"
    return Table(headers=tuple(headers), rows=tuple(rows), align=align).without_empty_columns(len(varied))


def _flag_counts(sweep: Sweep) -> Iterator[str]:
    """Which flags lowered the grades, each once with how many points have it and the remedy."""
    counts: dict[str, int] = {}
    remedies: dict[str, str] = {}
    for timing in sweep.timings:
        for flag in timing.flags:
            if flag.severity != "note":
                counts[flag.name] = counts.get(flag.name, 0) + 1
                remedies[flag.name] = flag.remedy
    for name, count in counts.items():
        yield f"{plain(name)} at {count} of {len(sweep.timings)} points -> {plain(remedies[name])}"


def _varied(sweep: Sweep) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The parameters with several values, and those with one."""
    varied = {key: values for key, values in sweep.parameters.items() if len(values) > 1}
    fixed = {key: values[0] for key, values in sweep.parameters.items() if len(values) == 1}
    if not varied and fixed:  # a sweep of one point still has something to plot against
        key = next(iter(fixed))
        varied = {key: (fixed.pop(key),)}
    return varied, fixed


def _shared(points: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The parameters that have the same value at all of several points."""
    if len(points) < 2:
        return {}
    return {key: value for key, value in points[0].items() if all(point.get(key) == value for point in points)}


def _x_parameter(varied: Mapping[str, Sequence[str]]) -> str:
    """The numeric parameter with the most values; without a numeric one, the parameter with the most values."""
    numeric = {key: values for key, values in varied.items() if all(_number(value) is not None for value in values)}
    candidates = numeric or varied
    return max(candidates, key=lambda key: len(candidates[key])) if candidates else ""


def _positions(values: Sequence[str]) -> dict[str, float]:
    """Where each value stands on the axis: at itself if all are numbers, else one after the other."""
    numbers = [_number(value) for value in values]
    return {
        value: float(i + 1) if None in numbers else number or 0.0
        for i, (value, number) in enumerate(zip(values, numbers, strict=True))
    }


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
