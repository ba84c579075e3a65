"""The ops of a profile as CSV (RFC 4180): one line per op, times in seconds, an empty cell for what is not known.

A spreadsheet runs a cell that begins with = + - or @ as a formula, and names of ops and files come from outside: such
texts get a quote in front. Numbers stay numbers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping

from nearpeak.profiles.profile import Profile, ProfiledOp

Cell = str | int | float | bool | None

COLUMNS: Mapping[str, Callable[[ProfiledOp], Cell]] = {
    "name": lambda op: op.name,
    "family": lambda op: op.family,
    "phase": lambda op: op.phase,
    "module": lambda op: op.module,
    "source": lambda op: op.source,
    "shapes": lambda op: "; ".join("x".join(map(str, shape)) or "()" for shape in op.shapes),
    "kernels": lambda op: op.kernels,
    "measured_s": lambda op: op.measured_s,
    "typical_s": lambda op: op.typical_s,
    "quickest_s": lambda op: op.quickest_s,
    "slowest_s": lambda op: op.slowest_s,
    "bound_s": lambda op: op.bound_s if op.modeled else None,
    "fused_s": lambda op: op.fused_s if op.modeled else None,
    "expected_s": lambda op: op.expected_s,
    "lost_s": lambda op: op.lost_s if op.modeled else None,
    "launch_wait_s": lambda op: op.launch_wait_s,
    "limiter": lambda op: op.limiter,
    "flops": lambda op: op.flops,
    "bytes": lambda op: op.bytes,
    "modeled": lambda op: op.modeled,
}
"""The names are those of `ProfiledOp`."""


def ops_csv(profile: Profile) -> str:
    """All ops in the order in which they ran, below a line with the names of the columns."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\r\n")
    writer.writerow(["op", *COLUMNS])
    for number, op in enumerate(profile.ops):
        writer.writerow([number, *(_cell(column(op)) for column in COLUMNS.values())])
    return stream.getvalue()


def _cell(value: Cell) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return guard_formula(value) if isinstance(value, str) else value


def guard_formula(text: str) -> str:
    """A text that no spreadsheet takes for a formula; spaces before one do not help.

    >>> guarded("=1+1"), guarded(" @SUM(A1)"), guarded("aten.add.Tensor")
    ("'=1+1", "' @SUM(A1)", 'aten.add.Tensor')
    """
    formula = text.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{text}" if formula or text.startswith(("\t", "\r", "\n")) else text
