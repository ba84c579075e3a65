"""An example as it was run, as text for a terminal, Markdown for the site, and one HTML page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nearpeak._display import printable
from nearpeak.gallery.parts import (
    Drawing,
    ExampleResult,
    Part,
    Plot,
    Prediction,
    PredictionTable,
    Prose,
    StackedBars,
    Unit,
)
from nearpeak.render import markdown as md
from nearpeak.render.document import CodeBlock, Document, Paragraph, Picture, Table
from nearpeak.render.picture.bars import stacked_bars
from nearpeak.render.picture.plot import line_plot, text_plot
from nearpeak.render.picture.svg import svg
from nearpeak.render.text import PLAIN, Style, cell_text
from nearpeak.render.text import text as document_text
from nearpeak.units import percent, quantity, significant
from nearpeak.units import seconds as duration

Shown = Paragraph | Table | Picture | CodeBlock


def shown(unit: Unit) -> Callable[[float | None], str]:
    """How values of a unit are written."""
    if unit == "s":
        return duration
    if unit == "%":
        return percent
    if unit == "":
        return lambda value: "-" if value is None else significant(value)
    if unit == "x":
        return lambda value: "-" if value is None else f"{significant(value)}x"
    return lambda value: quantity(value, unit)


def facts(result: ExampleResult) -> tuple[str, ...]:
    """Where, when and with what it was run."""
    what = "measured on" if result.measured else "predicted for"
    versions = ", ".join(f"{name} {number}" for name, number in result.versions)
    return (f"{what} {result.machine}, {result.date}; {versions}",)


def verdict(result: ExampleResult) -> str:
    """How many predictions held; nothing where nothing was measured beside one. Doubts follow."""
    said = _held(result)
    flags = [doubt.partition(" ")[0] for doubt in result.doubts if doubt.partition(" ")[0].isupper()]
    if not said or not result.doubts:
        return said
    return f"{said} Doubts: {', '.join(flags) or 'the calibration'}."


def _held(result: ExampleResult) -> str:
    judged = [row for row in result.rows if row.holds is not None]
    if not judged:
        return ""
    held = len(judged) - len(result.missed)
    if held == len(judged):
        if held == 1:
            return "The prediction is within its band."
        return f"{'Both' if held == 2 else f'All {held}'} predictions are within their bands."
    return f"{held} of {len(judged)} predictions are within their bands."


def document(result: ExampleResult) -> Document:
    """All but plots and bars as they are in a terminal."""
    return Document(
        title=f"{result.number}. {result.title}",
        facts=facts(result),
        parts=tuple(_parts(result)),
        is_story=True,
    )


def _parts(result: ExampleResult) -> Iterator[Shown]:
    yield Paragraph(text=result.lesson)
    for part in result.parts:
        yield from _part(part)
    if result.skipped:
        yield Paragraph(text=f"Not run here: {result.skipped}", kind="small")
    for doubt in result.doubts:
        yield Paragraph(text=doubt, kind="small")
    said = verdict(result)
    if said:
        yield Paragraph(text=said, kind="bad" if result.missed else "good")


def _part(part: Part) -> Iterator[Shown]:
    if isinstance(part, Prose):
        yield Paragraph(text=part.text)
    elif isinstance(part, PredictionTable):
        yield compared_table(part)
    elif isinstance(part, (Table, CodeBlock)):
        yield part
    elif isinstance(part, (Plot, StackedBars, Drawing)):
        yield Picture(title=part.title, svg=picture(part))


def compared_table(part: PredictionTable) -> Table:
    """Predictions beside measurements."""
    write = shown(part.unit)
    rows = [(row.what, write(row.predicted), write(row.measured), _ratio(row), _band(row)) for row in part.rows]
    headers = ("", "predicted", "measured", "measured / predicted", "band")
    if all(row.measured is None for row in part.rows):
        return Table(title=part.title, headers=headers[:2], rows=tuple(row[:2] for row in rows), note=part.note)
    return Table(title=part.title, headers=headers, rows=tuple(rows), note=part.note)


def _ratio(row: Prediction) -> str:
    if row.ratio is None:
        return "-"
    return f"{row.ratio:.2f}" + ("" if row.holds is not False else " !")


def _band(row: Prediction) -> str:
    if row.low is None:
        return "-"
    return f"from {row.low:.3g} on" if row.high is None else f"{row.low:.3g} - {row.high:.3g}"


def picture(part: Plot | StackedBars | Drawing) -> str:
    """As an SVG file."""
    if isinstance(part, Drawing):
        return part.svg
    if isinstance(part, StackedBars):
        scene = stacked_bars(
            part.bars,
            title=part.title,
            subtitle=part.subtitle,
            shown=shown(part.unit),
            limit=part.limit,
            limit_name=part.limit_name,
            totals=part.are_summed and len(part.bars[0].pieces) > 1,
        )
        return svg(scene)
    return line_plot(
        part.series,
        title=part.title,
        x_label=part.x_label,
        y_label=part.y_label,
        log_x=part.log_x,
        log_y=part.log_y,
        x_format=_ticks(part.x_unit),
        y_format=_ticks(part.y_unit),
    )


def _ticks(unit: Unit) -> Callable[[float], str]:
    """As on an axis: a long unit is in the name of the axis alone."""
    if unit in ("B/s", "FLOP", "FLOP/s", "FLOP/B"):
        return lambda value: quantity(value, "").rstrip()
    return shown(unit)


def text(result: ExampleResult, style: Style = PLAIN) -> str:
    """For a terminal, at most 80 columns: plots are drawn with characters, bars beside their figures."""
    whole = document(result)
    pieces = [document_text(Document(title=whole.title, facts=whole.facts, parts=()), style)]
    pieces.append(_said(Paragraph(text=result.lesson), style))
    for part in result.parts:
        if isinstance(part, Plot):
            drawn = text_plot(
                part.series,
                log_x=part.log_x,
                log_y=part.log_y,
                x_format=shown(part.x_unit),
                y_format=shown(part.y_unit),
            )
            pieces.append(printable(f"{part.title}: {part.y_label} by {part.x_label}\n\n{drawn}"))
        elif isinstance(part, StackedBars):
            pieces += [_said(one, style) for one in _bars_table(part)]
        elif isinstance(part, Drawing):
            pieces.append(_said(Paragraph(text=f"[{part.described}]", kind="small"), style))
        else:
            pieces += [_said(one, style) for one in _part(part)]
    last = whole.parts[-2 - len(result.doubts) :]
    ending = [part for part in last if isinstance(part, Paragraph) and part.kind in ("good", "bad", "small")]
    pieces += [_said(one, style) for one in ending]
    return "\n\n".join(piece for piece in pieces if piece)


def _said(part: Shown, style: Style) -> str:
    return document_text(Document(title="", is_titled=False, parts=(part,)), style)


def _bars_table(part: StackedBars) -> Iterator[Table]:
    write = shown(part.unit)
    names = [name for name, _ in part.bars[0].pieces]
    rows = []
    for bar in part.bars:
        pieces = dict(bar.pieces)
        rows.append((bar.name, *(write(pieces.get(name)) for name in names), write(bar.total)))
    headers = ("", *names, "together")
    bars = tuple(bar.total for bar in part.bars)
    if len(names) == 1:
        rows, headers = [row[:2] for row in rows], headers[:2]
    yield Table(title=part.title, headers=headers, rows=tuple(rows), bars=bars)


def markdown(result: ExampleResult, pictures: Callable[[str, str], str]) -> str:
    """For the site, without its title. `pictures` is given a name and an SVG file, and gives the address of it."""
    pieces = [f"_{md.escape_text(fact)}_" for fact in facts(result)]
    number = 0
    for part in result.parts:
        for one in _part(part):
            if isinstance(one, Picture):
                number += 1
                where = pictures(f"{result.name}-{number}", one.svg)
                described = part.described if isinstance(part, Drawing) else one.title
                pieces.append(f"![{md.escape_text(described)}]({where})")
            elif isinstance(one, Table):
                head = f"**{md.escape_text(one.title)}**\n\n" if one.title else ""
                rows = [[md.escape_text(cell_text(cell)) for cell in row] for row in one.rows]
                pieces.append(head + md.table([md.escape_text(name) for name in one.headers], rows, one.sides))
                if one.note:
                    pieces.append(_paragraph(one.note))
            elif isinstance(one, CodeBlock):
                pieces.append(md.code_block(one.text, one.language))
            else:
                pieces.append(_paragraph(one.text))
    if result.skipped:
        pieces.append(_paragraph(f"Not run here: {result.skipped}"))
    pieces += [_paragraph(doubt) for doubt in result.doubts]
    said = verdict(result)
    if said:
        pieces.append(f"**{said}**")
    return "\n\n".join(pieces) + "\n"


def _paragraph(said: str) -> str:
    """Prose as Markdown; names between backticks are code."""
    pieces = re.split(r"(`[^`]+`)", said)
    written = [md.code(one[1:-1]) if number % 2 else _unstripped(one) for number, one in enumerate(pieces)]
    return "".join(written)


def _unstripped(said: str) -> str:
    """Text with the spaces at its ends, which stand between it and code."""
    inner = said.strip()
    return said.replace(inner, md.escape_text(inner, 4000)) if inner else said
