"""A difference of two profiles as Markdown, for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from nearpeak.diagnose.difference import Difference
from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.gate import Gate
from nearpeak.render.difference import (
    TOP,
    counts,
    finding_text,
    how_text,
    key,
    memory_text,
    no_ops,
    parts_rows,
    relative,
    remarks,
    rest,
    signed,
    verdict,
)
from nearpeak.render.markdown import details, table, text
from nearpeak.render.profile_card import place
from nearpeak.units import seconds

MARKER = "<!-- nearpeak diff -->"
"""The first line, by which a workflow finds its own comment again."""
MOST_ROWS = 60
MOST_FINDINGS = 20
"""A comment holds 65,536 characters."""


def markdown(
    found: Difference, top: int = TOP, *, names: tuple[str, str] = ("", ""), result: Gate | None = None
) -> str:
    """The report; what comes from outside cannot add markup, links or mentions to it."""
    titles = {
        "same": "no change of the step that noise does not explain",
        "slower": f"the step is slower, {signed(found.change)}",
        "faster": f"the step is faster, {signed(found.change)}",
    }
    parts = [
        f"{MARKER}\n### nearpeak: {titles[found.verdict]}",
        text(verdict(found)),
        "" if result is None else f"**Gate {result.outcome}**: {text(result.reason)}.",
        _runs(found, names),
        _ops(found, min(top, MOST_ROWS)),
        details("Waterfall", _cells(*parts_rows(found), "lrrrr")),
        _idle(found),
        text(memory_text(found)),
        _findings("New findings", found.appeared),
        _findings("Findings that are gone", found.gone),
        "\n".join(f"- {text(line)}" for line in remarks(found)),
    ]
    return "\n\n".join(part for part in parts if part)


def _runs(found: Difference, names: tuple[str, str]) -> str:
    rows = []
    for label, name, run in zip(("before", "after"), names, (found.before, found.after), strict=True):
        steps = f"{run.steps} clean" if run.steps else "under the profiler"
        what = place(name, 60) or place(run.source, 60)
        rows.append([label, what, run.device, run.date[:16].replace("T", " "), seconds(run.step_s), steps])
    return _cells(["", "run", "device", "when", "step", "steps"], rows, "llllrl")


def _ops(found: Difference, top: int) -> str:
    if not found.ops:
        return no_ops(found)
    shown = found.ops[:top]
    rows = []
    for change in shown:
        where = ", ".join(filter(None, (place(change.module, 60), place(change.source, 40))))
        times = [seconds(change.before_s), seconds(change.after_s), relative(change)]
        rows.append([" ".join(key(change)), counts(change), *times, how_text(change), where])
    before_s, after_s = rest(found, shown)
    left = len(found.ops) - len(shown)
    other = f"all other kernels ({left} more changed)" if left else "all other kernels"
    change_text = signed(after_s / before_s - 1.0) if before_s else "-"
    rows.append([other, "", seconds(before_s), seconds(after_s), change_text, "", ""])
    return _cells(["op that changed", "ops", "before", "after", "change", "how", "where"], rows, "lrrrrll")


def _idle(found: Difference) -> str:
    rows = [
        [
            change.cause,
            seconds(change.before_s),
            seconds(change.after_s),
            f"{change.count_before} > {change.count_after}",
            f"{place(change.where, 60)} {change.what[:60]}".strip(),
        ]
        for change in found.idle
    ]
    return _cells(["idle because of", "before", "after", "times", "where"], rows, "lrrrl") if rows else ""


def _findings(title: str, findings: Sequence[Finding]) -> str:
    lines = [f"- {text(finding_text(finding))}" for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        lines.append(f"- and {len(findings) - MOST_FINDINGS} more")
    return "\n".join([f"{title}:", "", *lines]) if lines else ""


def _cells(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table of plain text; a change may begin with its sign."""
    return table(headers, [[text(cell) for cell in row] for row in rows], align)
