"""A difference of two profiles as Markdown, for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from nearpeak.diffs.difference import Difference
from nearpeak.diffs.gate import Gate
from nearpeak.profiles.finding import Finding
from nearpeak.render.markdown import details, escape_text, table
from nearpeak.render.views.difference import (
    TOP,
    change_name,
    counts,
    finding_text,
    memory_text,
    no_changed_ops,
    other_kernel_seconds,
    parts_rows,
    relation_text,
    relative,
    remarks,
    signed_percent,
    verdict,
)
from nearpeak.render.views.verdict import elide_start
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
        "slower": f"the step is slower, {signed_percent(found.change)}",
        "faster": f"the step is faster, {signed_percent(found.change)}",
    }
    parts = [
        f"{MARKER}\n### nearpeak: {titles[found.verdict]}",
        escape_text(verdict(found)),
        "" if result is None else f"**Gate {result.outcome}**: {escape_text(result.reason)}.",
        _runs(found, names),
        _ops(found, min(top, MOST_ROWS)),
        details("Waterfall", _text_table(*parts_rows(found), "lrrrr")),
        _idle(found),
        escape_text(memory_text(found)),
        _findings("New findings", found.appeared),
        _findings("Findings that are gone", found.gone),
        "\n".join(f"- {escape_text(line)}" for line in remarks(found)),
    ]
    return "\n\n".join(part for part in parts if part)


def _runs(found: Difference, names: tuple[str, str]) -> str:
    rows = []
    for label, name, run in zip(("before", "after"), names, (found.before, found.after), strict=True):
        steps = f"{run.steps} clean" if run.steps else "under the profiler"
        what = elide_start(name, 60) or elide_start(run.source, 60)
        rows.append([label, what, run.device, run.date[:16].replace("T", " "), seconds(run.step_s), steps])
    return _text_table(["", "run", "device", "when", "step", "steps"], rows, "llllrl")


def _ops(found: Difference, top: int) -> str:
    if not found.ops:
        return no_changed_ops(found)
    shown = found.ops[:top]
    rows = []
    for change in shown:
        where = ", ".join(filter(None, (elide_start(change.module, 60), elide_start(change.source, 40))))
        times = [seconds(change.before_s), seconds(change.after_s), relative(change)]
        rows.append([" ".join(change_name(change)), counts(change), *times, relation_text(change), where])
    before_s, after_s = other_kernel_seconds(found, shown)
    left = len(found.ops) - len(shown)
    other = f"all other kernels ({left} more changed)" if left else "all other kernels"
    change_text = signed_percent(after_s / before_s - 1.0) if before_s else "-"
    rows.append([other, "", seconds(before_s), seconds(after_s), change_text, "", ""])
    return _text_table(["op that changed", "ops", "before", "after", "change", "how", "where"], rows, "lrrrrll")


def _idle(found: Difference) -> str:
    rows = [
        [
            change.cause,
            seconds(change.before_s),
            seconds(change.after_s),
            f"{change.count_before} > {change.count_after}",
            f"{elide_start(change.where, 60)} {change.what[:60]}".strip(),
        ]
        for change in found.idle
    ]
    return _text_table(["idle because of", "before", "after", "times", "where"], rows, "lrrrl") if rows else ""


def _findings(title: str, findings: Sequence[Finding]) -> str:
    lines = [f"- {escape_text(finding_text(finding))}" for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        lines.append(f"- and {len(findings) - MOST_FINDINGS} more")
    return "\n".join([f"{title}:", "", *lines]) if lines else ""


def _text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table of plain text; a change may begin with its sign."""
    return table(headers, [[escape_text(cell) for cell in row] for row in rows], align)
