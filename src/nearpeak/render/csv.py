"""Tables as CSV (RFC 4180): an empty cell for what is not known, numbers as numbers.

A spreadsheet runs a cell that begins with = + - or @, also in full width, as a formula, and names of ops and files come
from outside: such texts get a quote in front.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from nearpeak._display import printable
from nearpeak.render.document import Document, printable_document
from nearpeak.render.text import cell_text

Value = str | int | float | bool | None
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(e[+-]?\d+)?( ?[%\w/]+)?")


def csv_text(document: Document) -> str:
    """All tables of a document, one after the other; each row after the title of its table where there are several."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    tables = [part for part in printable_document(document).tables if part.rows]
    for part in tables:
        before = [_shown(part.title)] if len(tables) > 1 else []
        writer.writerow([*(["table"] if before else []), *map(_shown, part.headers)])
        writer.writerows([*before, *(_shown(cell_text(cell)) for cell in row)] for row in part.rows)
    return stream.getvalue()


def rows_csv(headers: Sequence[str], rows: Iterable[Iterable[Value]]) -> str:
    """Rows of values below a line with the names of their columns."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\r\n")
    writer.writerow(map(_value, headers))
    writer.writerows([_value(value) for value in row] for row in rows)
    return stream.getvalue()


def _shown(value: str) -> str:
    """A quantity as it is, nothing for "-", and a text that no spreadsheet takes for a formula."""
    if value == "-":
        return ""
    return value if _NUMBER.fullmatch(value) else guard_formula(value)


def _value(value: Value) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return guard_formula(printable(value)) if isinstance(value, str) else value


def guard_formula(text: str) -> str:
    """A text that no spreadsheet takes for a formula; spaces before one do not help.

    >>> guard_formula("=1+1"), guard_formula(" @SUM(A1)"), guard_formula("aten.add.Tensor")
    ("'=1+1", "' @SUM(A1)", 'aten.add.Tensor')
    """
    is_formula = text.lstrip().startswith(("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20"))
    return f"'{text}" if is_formula or text.startswith(("\t", "\r", "\n")) else text
