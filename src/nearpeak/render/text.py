"""Plain text for terminals: names made safe and short, aligned tables, and a `Document` as text of 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nearpeak._display import printable
from nearpeak.ops.op import name_without_origin, origin_of_name
from nearpeak.render.document import (
    Block,
    Cell,
    CodeBlock,
    Color,
    Details,
    Document,
    Fact,
    Facts,
    Items,
    Name,
    Paragraph,
    Section,
    Span,
    Table,
    Time,
    printable_document,
)
from nearpeak.units import seconds

WIDTH = 80
INDENT = 4
HEAD_LABEL = 12
"""Columns of the labels of facts below a title."""
BAR_COLUMNS = 20
"""Of the longest bar of a table."""
SPAN_COLUMNS = 40
"""Of a span of the whole."""
NARROWEST = 12
"""Columns that a text keeps at least."""
NARROWEST_NAME = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"
_CODES: dict[Color, int] = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What the terminal or file that a report goes to can show."""

    color: bool = False
    """The sixteen basic colors, as the terminal's owner set them."""
    blocks: bool = False
    """Bars of block characters, to an eighth of a column."""

    def paint(self, text: str, color: Color) -> str:
        """The text in a color, where there are colors.

        >>> Style().paint("idle", "red"), Style(color=True).paint("idle", "red")
        ('idle', '\\x1b[31midle\\x1b[0m')
        """
        return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if self.color and text else text

    def bar(self, columns: float) -> str:
        """A bar of a length in columns; anything above zero is visible where eighths can be drawn.

        >>> Style().bar(3.4), Style(blocks=True).bar(3.5), Style(blocks=True).bar(0.01)
        ('###', '███▌', '▏')
        """
        if columns <= 0.0:
            return ""
        if not self.blocks:
            return "#" * round(columns)
        eighths = max(1, round(8 * columns))
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


PLAIN = Style()


def plain(value: str, longest: int = 0) -> str:
    """Text from outside as printable ASCII on one line, cut to `longest` characters where that is given.

    >>> plain("gr\\u00f6\\u00dfe\\x1b[31m"), plain("abcdefgh", 6)
    ('gr\\\\xf6\\\\xdfe\\\\x1b[31m', 'abc...')
    """
    safe = " ".join(value.split())
    safe = "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in safe)
    return safe[: longest - 3] + "..." if longest and len(safe) > longest else safe


def elide(name: str, room: int) -> str:
    """A name in at most `room` columns, its middle left out: the ends tell one from another.

    >>> elide("triton_red_fused__log_softmax_backward_12", 24)
    'triton_red_f...ckward_12'
    """
    tail = 9 if room >= 20 else room // 3
    return name if len(name) <= room else f"{name[: room - tail - 3]}...{name[-tail:]}"


def elide_start(source: str, longest: int = 30) -> str:
    """A source line, its beginning left out where it is too long: the file and the line are at its end."""
    safe = plain(source)
    return safe if len(safe) <= longest else "..." + safe[3 - longest :]


def short_name(op: str) -> str:
    """An operator's name as people say it; a kernel of Inductor's by what it fuses.

    >>> short_name("aten.gelu_backward.default"), short_name("aten.sum.dim_IntList"), short_name("mine.kernel")
    ('gelu_backward', 'sum.dim_IntList', 'mine.kernel')
    """
    return plain(_without_namespace(op).removesuffix(".default"))


def packet_name(op: str) -> str:
    """An operator without its namespace and its overload.

    >>> packet_name("aten.mul.Tensor"), packet_name("mine.kernel.default")
    ('mul', 'mine.kernel')
    """
    packet = op.rpartition(".")[0] if op.count(".") > 1 else op
    return plain(_without_namespace(packet), 60)


def _without_namespace(op: str) -> str:
    """A name without "aten.", and of a kernel of Inductor's what it fuses."""
    kernel = name_without_origin(op)
    if origin_of_name(op) == "inductor" and kernel.startswith(("triton_", "cpp_")):
        return kernel.removeprefix("triton_").removeprefix("cpp_")
    return op.removeprefix("aten.")


def signed_percent(value: float) -> str:
    """A change with its sign.

    >>> signed_percent(0.031)
    '+3.1 %'
    """
    return f"{100 * value:+.1f} %"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 op", "1,200 ops"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def wrap(line: str, hanging: int = 0, indent: int = 0) -> str:
    """The text in lines of 80 columns. No line begins with a percent sign, and paths and addresses stay whole."""
    together = line.replace(" %", "\xa0%")
    has_path = any(len(word) > WIDTH - hanging and "/" in word for word in line.split())
    wrapped = textwrap.fill(
        together,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
        break_long_words=not has_path,
    )
    return wrapped.replace("\xa0", " ")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """The rows under their headers, columns two spaces apart, no line ending in a space.

    `align` has one letter per column, "l" or "r"; without it the first column is left and the others are right.

    >>> print(table(["op", "time"], [["add", "29.4 us"], ["matmul", "1.20 ms"]]))
    op         time
    ------  -------
    add     29.4 us
    matmul  1.20 ms
    """
    headers, *rows = ([printable(cell) for cell in row] for row in (headers, *rows))
    align = align or "l" + "r" * (len(headers) - 1)
    if len(align) != len(headers) or set(align) - set("lr"):
        raise ValueError(f"align must have {len(headers)} letters, each l or r; got {align!r}")
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells under {len(headers)} headers: {list(row)!r}")
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(row, widths, align) for row in (headers, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int], align: str) -> str:
    padded = [
        cell.ljust(width) if side == "l" else cell.rjust(width)
        for cell, width, side in zip(cells, widths, align, strict=True)
    ]
    return "  ".join(padded).rstrip()


def text(document: Document, style: Style = PLAIN) -> str:
    """A document for a terminal: at most 80 columns where the cells allow it."""
    document = printable_document(document)
    head = []
    if document.is_titled:
        head = [style.paint(line, "bold") for line in wrap(_spaced(document.title)).split("\n")]
        head += [_head_fact(fact) for fact in document.facts]
    return "\n\n".join(["\n".join(head), *_blocks(document.parts, style)] if head else _blocks(document.parts, style))


def _head_fact(fact: str | Fact) -> str:
    if isinstance(fact, Fact):
        return wrap(f"{fact.label:<{HEAD_LABEL}}{plain(fact.text)}", HEAD_LABEL)
    return wrap(_spaced(fact))


def _spaced(line: str) -> str:
    """Plain text that keeps two spaces between its parts."""
    return "  ".join(map(plain, line.split("  ")))


def _blocks(blocks: Iterable[Block], style: Style) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Paragraph):
            yield _paragraph(block, style)
        elif isinstance(block, Facts):
            yield "\n".join(_fact(fact, block.width, style) for fact in block.facts)
        elif isinstance(block, Items):
            yield _items(block)
        elif isinstance(block, CodeBlock):
            yield _code(block, INDENT)
        elif isinstance(block, Details):
            yield _details(block, style)
        elif isinstance(block, Section):
            if block.is_titled:
                yield style.paint(f"{block.title}:", "bold")
            yield from _blocks(block.blocks, style)
        elif isinstance(block, Table) and (block.rows or block.is_shown_empty):
            yield _table(block, style)


def _paragraph(block: Paragraph, style: Style) -> str:
    lines = wrap(plain(block.text))
    colors: dict[str, Color] = {"good": "green", "bad": "red", "small": "dim"}
    color = colors.get(block.kind)
    if color is not None:
        return "\n".join(style.paint(line, color) for line in lines.split("\n"))
    if block.accent is not None:
        word, color = block.accent
        return lines.replace(word, style.paint(word, color), 1)
    return lines


def _fact(fact: Fact, width: int, style: Style) -> str:
    """The label is painted after wrapping: its codes have no width."""
    line = wrap(f"{fact.label:<{width}}{plain(fact.text)}", width)
    if fact.most_lines is not None:
        line = _cut(line, fact.most_lines)
    if fact.color is not None:
        line = style.paint(fact.label, fact.color) + line[len(fact.label) :]
    return f"{line}\n{wrap(f'-> {plain(fact.advice)}', 3, width)}" if fact.advice else line


def _items(block: Items) -> str:
    indent = len(block.marker) - len(block.marker.lstrip())
    if block.most_lines is not None:
        lines = [_cut(_indented(item), block.most_lines) for item in block.items]
    else:
        lines = [wrap(block.marker.lstrip() + plain(item), block.hanging, indent) for item in block.items]
    title = [wrap(plain(block.title))] if block.title else []
    return ("\n\n" if block.spaced else "\n").join([*title, *lines])


def _indented(item: str) -> str:
    """An item in lines with its own indentation; a number at its beginning hangs."""
    indent = len(item) - len(item.lstrip())
    return wrap(_spaced(item.lstrip()), 0 if indent else INDENT, indent)


def _cut(lines: str, most: int) -> str:
    """Lines of text, without those beyond `most`."""
    if lines.count("\n") < most:
        return lines
    *first, last = lines.split("\n")[:most]
    if len(last) > WIDTH - 4:
        last = last[: WIDTH - 4].rpartition(" ")[0] or last[: WIDTH - 4]  # no part of a word
    return "\n".join([*first, f"{last.rstrip(' .,:;')} ..."])


def _code(block: CodeBlock, indent: int) -> str:
    """Lines with their own indentation."""
    lines = block.text.strip("\n").rstrip().split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines]
    return "\n".join(
        f"{' ' * (indent + inner)}{plain(line)}".rstrip() for line, inner in zip(lines, indents, strict=True)
    )


def _details(block: Details, style: Style) -> str:
    """The summary, and below it the paragraphs as one, then advice and code."""
    lines = [style.paint(_spaced(block.summary), "yellow")]
    paragraphs = [inner for inner in block.blocks if isinstance(inner, Paragraph) and inner.kind != "advice"]
    lines.append(wrap(" ".join(filter(None, (plain(paragraph.text) for paragraph in paragraphs))), 0, INDENT))
    for inner in block.blocks:
        if isinstance(inner, Paragraph) and inner.kind == "advice":
            lines.append(wrap(plain(inner.text), 0, INDENT))
        elif isinstance(inner, CodeBlock):
            lines.append(_code(inner, 2 * INDENT))
    return "\n".join(lines)


def _table(part: Table, style: Style) -> str:
    columns = [i for i in range(len(part.headers)) if i not in (part.below, part.beside, *part.wide)]
    headers = [part.headers[i] for i in columns]
    align = "".join(part.sides[i] for i in columns)
    scale, unit, digits = _common_unit(part)
    if unit:
        headers[0] = f"{headers[0]}, in {unit}"
    cells = [[_cell(row[i], scale, digits) for i in columns] for row in part.rows]
    rows = _fit_names(headers, cells)
    rows = _fit_width(headers, rows, align)
    beside = [] if part.beside is None else [plain(str(row[part.beside])) for row in part.rows]
    span_columns = SPAN_COLUMNS if part.beside is None else SPAN_COLUMNS // 2
    bars = [_span(span, style, span_columns) for span in part.spans]
    if part.bars:
        longest = max(part.bars) or 1.0
        room = WIDTH - len(table(headers, rows, align).split("\n")[1]) - 2
        bars = [style.bar(BAR_COLUMNS * share / longest) for share in part.bars] if room >= BAR_COLUMNS else []
    lines = table(headers, rows, align).split("\n")
    if beside:
        blank = " " * (span_columns + 2)
        bars = [f"{bar}{text}" for bar, text in zip((*bars, *[blank] * (len(rows) - len(bars))), beside, strict=True)]
    if bars:
        bars = ["", "", *bars, *[""] * (len(rows) - len(bars))]
        width = max(map(len, lines))
        lines = [f"{line:<{width}}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]
    if not part.is_headed:
        lines = lines[2:]
    if part.totals and not part.spans:
        lines[-part.totals :] = [style.paint(line, "bold") for line in lines[-part.totals :]]
    if part.below is not None:
        texts = [row[part.below] for row in part.rows]
        pairs = zip(lines[2:], texts, strict=True)
        lines = [
            *lines[:2],
            *(f"{line}\n{wrap(plain(str(below)), 0, part.indent)}" if below else line for line, below in pairs),
        ]
    body = "\n".join(([wrap(plain(part.title)), ""] if part.title else []) + lines)
    return body + (f"\n\n{wrap(plain(part.note))}" if part.note else "")


def _cell(cell: Cell, scale: float, digits: int) -> str | Name:
    if isinstance(cell, Time):
        return f"{cell.seconds / scale:.{digits}f}"
    return cell if isinstance(cell, Name) else plain(cell)


def _common_unit(part: Table) -> tuple[float, str, int]:
    """Seconds in a unit, its name, and the decimals that give the largest time three digits."""
    times = [cell.seconds for row in part.rows for cell in row if isinstance(cell, Time)]
    if not times:
        return 1.0, "", 0
    largest = max(times)
    exponent = min(0, max(-9, 3 * math.floor(math.log10(largest) / 3))) if largest > 0.0 else 0
    scale = 10.0**exponent
    return scale, {0: "s", -3: "ms", -6: "us", -9: "ns"}[exponent], 1 if largest >= 100 * scale else 2


def _fit_names(headers: Sequence[str], rows: Sequence[Sequence[str | Name]]) -> list[list[str]]:
    """Names in the room that the other columns leave."""
    widths = [
        max([len(header), *(len(cell) for row in rows if isinstance(cell := row[i], str))])
        for i, header in enumerate(headers)
    ]
    with_names = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, Name)}
    used = sum(2 + width for i, width in enumerate(widths) if i not in with_names)
    room = max(NARROWEST_NAME, WIDTH - used - 2 * (len(with_names) - 1))
    return [[_fit_name(cell, room) if isinstance(cell, Name) else cell for cell in row] for row in rows]


def _fit_name(name: Name, room: int) -> str:
    suffix = plain(name.suffix, 23)
    left = room - len(suffix) - 1 if suffix else room
    if name.cut == "start":
        shown = elide_start(name.name, left)
    else:
        shown = elide(plain(name.name), left) if name.cut == "middle" else plain(name.name, left)
    return f"{shown} {suffix}".strip()


def _span(span: Span, style: Style, columns: int) -> str:
    """A bar, or the text in its place; before a text beside it, filled up with spaces."""
    if span.text:
        return style.paint(f"({span.text})", "red") + ("  " if columns < SPAN_COLUMNS else "")
    begin = round(columns * min(max(span.begin, 0.0), 1.0))
    bar = style.bar(columns * min(span.length, 1.0))
    if columns == SPAN_COLUMNS:
        return " " * begin + style.paint(bar, span.color)
    begin = min(begin, columns - 1)
    bar = bar[: columns - begin]
    return " " * begin + style.paint(bar, span.color) + " " * (columns - begin - len(bar) + 2)


def _fit_width(headers: list[str], rows: list[list[str]], align: str) -> list[list[str]]:
    """The rows with their longest texts cut, until the table has 80 columns; numbers are never cut."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    while over > 0:
        texts = [i for i, side in enumerate(align) if side == "l" and widths[i] > max(NARROWEST, len(headers[i]))]
        if not texts:
            break
        widest = max(texts, key=lambda i: widths[i])
        excess = min(over, widths[widest] - max(NARROWEST, len(headers[widest])))
        widths[widest] -= excess
        over -= excess
    return [
        [elide(cell, width) if len(cell) > width else cell for cell, width in zip(row, widths, strict=True)]
        for row in rows
    ]


def cell_text(cell: Cell) -> str:
    """A cell as one text, for formats that have room for it."""
    if isinstance(cell, Time):
        return seconds(cell.seconds)
    return f"{cell.name} {cell.suffix}".strip() if isinstance(cell, Name) else cell
