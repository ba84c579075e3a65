"""The self-test's table."""

from __future__ import annotations

import textwrap

from nearpeak._display import printable
from nearpeak.measure.results import SelfTestReport

_MARKS = {True: "ok", False: "FAILED", None: "not run"}


def text(report: SelfTestReport) -> str:
    """One entry per experiment: the question, what was expected, what was found."""
    title = f"Self-test on {report.device}, torch {report.torch}, {report.date}" + (", quick" if report.quick else "")
    lines = textwrap.wrap(title, 80)
    for experiment in report.experiments:
        mark = _MARKS[experiment.passed]
        lines.append("")
        heading = f"{mark:8}{experiment.name}: {experiment.question} ({experiment.seconds:.0f} s)"
        lines += textwrap.wrap(heading, 80, subsequent_indent=" " * 8)
        for label, content in (("expected", experiment.expected), ("found", experiment.found)):
            lines += textwrap.wrap(f"{label:9}{content}", 80, initial_indent=" " * 8, subsequent_indent=" " * 17)
    counts = {mark: sum(e.passed is passed for e in report.experiments) for passed, mark in _MARKS.items()}
    lines += ["", ", ".join(f"{count} {mark}" for mark, count in counts.items() if count)]
    return printable("\n".join(lines))
