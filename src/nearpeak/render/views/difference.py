"""A difference of two profiles as text: the verdict, the waterfalls side by side, and what changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nearpeak.diffs.difference import Difference, OpChange
from nearpeak.diffs.noise import RunSummary
from nearpeak.profiles.finding import Finding
from nearpeak.render.text import PLAIN, Color, Style, table
from nearpeak.render.views.timing import plain
from nearpeak.render.views.verdict import elide, elide_start, short_name, wrap_text
from nearpeak.units import gibibytes, percent, seconds

TOP = 12
WIDTH = 80
LABEL = 9
MOST_NAMES = 4
LONGEST_NAME = 36
NARROWEST_KEY = 16
NOISY = 0.05
"""With more noise than this, no change says little."""
DRIFT_SHOWN = 0.005
"""A smaller drift explains nothing that is shown."""
STEP_AND_WALL = 0.005
"""Where the median step and the wall time of a report are further apart, the reader will wonder."""
MEMORY_CHANGE = 0.005
_COLORS: dict[str, Color] = {"slower": "red", "faster": "green", "same": "bold"}


def text(found: Difference, top: int = TOP, style: Style = PLAIN, *, names: tuple[str, str] = ("", "")) -> str:
    """The whole report, within 80 columns. `names` are what the user calls the two runs."""
    head = [_labeled("Verdict", verdict(found), style, _COLORS[found.verdict])]
    head += [
        _labeled(label, _run(run, name), style)
        for label, run, name in zip(("Before", "After"), (found.before, found.after), names, strict=True)
    ]
    parts = [
        "\n".join(head),
        table(*parts_rows(found)),
        _ops(found, top),
        _modules(found.ops),
        idle_text(found),
        memory_text(found),
        _findings("New findings", "+", found.appeared),
        _findings("Findings that are gone", "-", found.gone),
        *(wrap_text(line) for line in remarks(found)),
    ]
    return "\n\n".join(part for part in parts if part)


def verdict(found: Difference) -> str:
    """Whether the step changed, by how much, and whether that is real, in one sentence."""
    times = (
        f"{seconds(found.after.step_s)} a step against {seconds(found.before.step_s)}, {signed_percent(found.change)}"
    )
    noise = percent(math.expm1(found.noise))
    if found.by_clock:
        return (
            f"The same, as far as the clock lets tell: {times}. Runs of the same code differ by {noise}; what is "
            "beyond that is in no op and no idle time, and may be the clock of the GPU."
        )
    if found.verdict == "same" and (found.noise > NOISY or abs(found.change) > NOISY):
        return f"Too noisy to tell: {times}, where these runs may differ by {noise} by chance."
    if found.verdict == "same":
        return f"The same, as far as noise lets tell: {times}, where runs of the same code differ by up to {noise}."
    real = f"more than the {noise} by which runs of the same code differ"
    if found.explained and abs(math.log(found.ratio)) <= found.noise:
        real = f"within the {noise} by which runs of the same code differ, but ops that really changed account for it"
    return f"{found.verdict.capitalize()}: {times}, {real}."


def signed_percent(value: float) -> str:
    """A change with its sign: `signed(0.031)` is "+3.1 %"."""
    return f"{100 * value:+.1f} %"


def parts_rows(found: Difference) -> tuple[list[str], list[list[str]]]:
    """The waterfalls side by side: headers and rows."""
    before_s, after_s = found.before.wall_s, found.after.wall_s
    rows = [
        [
            part.name,
            seconds(part.before_s),
            seconds(part.after_s),
            _signed_seconds(part.change_s),
            _share(part.change_s, before_s),
        ]
        for part in found.parts
        if part.before_s or part.after_s
    ]
    change = after_s - before_s
    rows.append(["wall", seconds(before_s), seconds(after_s), _signed_seconds(change), _share(change, before_s)])
    return ["part", "before", "after", "change", "of the step"], rows


def no_changed_ops(found: Difference) -> str:
    """In place of a table of ops."""
    return "No op changed beyond noise." if found.steady else "Ops are not compared: the runs are too noisy."


def op_names(change: OpChange, most: int = MOST_NAMES) -> tuple[str, str]:
    """The operators before and after; "" where there are none."""
    before, after = (_name_list(names, most) for names in (change.names_before, change.names_after))
    return before, after


def change_name(change: OpChange) -> tuple[str, str]:
    """What ran, or what now does, in a few words, and its phase."""
    names = change.names_after or change.names_before
    fused = sum(name.startswith("inductor.") for name in names)
    short = f"{len(names)} kinds of kernels" if fused > 2 else _name_list(names, 2)
    return short, plain(change.phase, 10)


def relation_text(change: OpChange) -> str:
    """How the ops of both runs were matched, in a few words."""
    before, after = op_names(change)
    if change.relation == "replaced" and before != after:
        return f"{before} replaced by {after}"
    return {
        "same op": "same op",
        "moved": "same op in other modules",
        "reshaped": "same op on other shapes",
        "replaced": "same op",
        "only before": "gone",
        "only after": "new",
    }[change.relation]


def counts(change: OpChange) -> str:
    """How many ops."""
    same = change.count_before == change.count_after
    return f"{change.count_after}" if same else f"{change.count_before}>{change.count_after}"


def relative(change: OpChange) -> str:
    """The change of its time over what it was."""
    if not change.before_s:
        return "new"
    return "gone" if not change.after_s else signed_percent(change.after_s / change.before_s - 1.0)


def other_kernel_seconds(found: Difference, shown: Sequence[OpChange]) -> tuple[float, float]:
    """The kernel time of both runs that is not in these ops."""
    before_s = found.before.kernel_s - sum(change.before_s for change in shown)
    return max(0.0, before_s), max(0.0, found.after.kernel_s - sum(change.after_s for change in shown))


def idle_text(found: Difference) -> str:
    """The causes of idle time that changed."""
    rows = [
        [
            change.cause,
            seconds(change.before_s),
            seconds(change.after_s),
            _signed_seconds(change.change_s),
            f"{change.count_before}>{change.count_after}",
            f"{elide_start(change.where, 20)} {plain(change.what, 10)}".strip(),
        ]
        for change in found.idle
    ]
    return table(["idle because of", "before", "after", "change", "times", "where"], rows, "lrrrrl") if rows else ""


def memory_text(found: Difference) -> str:
    """The peak of memory in both runs; "" where one did not measure it."""
    before, after = found.before.peak_bytes, found.after.peak_bytes
    if not before or after is None:
        return ""
    change = after / before - 1.0
    if abs(change) < MEMORY_CHANGE:
        return f"Memory: {gibibytes(after)} at the peak, as before."
    return f"Memory: {gibibytes(after)} at the peak, {gibibytes(before)} before: {signed_percent(change)}."


def remarks(found: Difference) -> list[str]:
    """What to know about the comparison, a sentence or two each."""
    lines = [f"Not comparable without care: {plain(doubt)}." for doubt in found.doubts]
    lines += [plain(note) for note in found.notes]
    on_gpu = "cpu" not in (found.before.device, found.after.device)
    if found.drift is not None and abs(found.drift - 1.0) >= DRIFT_SHOWN:
        lines.append(
            f"{'Kernels that wait for memory' if on_gpu else 'All ops'} take {percent(abs(found.drift - 1.0))} "
            f"{_longer_or_shorter(found.drift)} alike. Ops are named for what they changed beyond that."
        )
    if found.clock is not None and abs(found.clock - 1.0) >= DRIFT_SHOWN:
        lines.append(
            f"Kernels that compute take {percent(abs(found.clock - 1.0))} {_longer_or_shorter(found.clock)}, as they do with "
            "another clock. Ops are named for what that does not explain."
        )
    if any(abs(run.step_s - run.wall_s) > STEP_AND_WALL * run.wall_s for run in (found.before, found.after)):
        lines.append(
            "The verdict compares median steps. The wall time of the table is that of all clean steps over their "
            "number, with slow ones."
        )
    return lines


def _longer_or_shorter(ratio: float) -> str:
    return "longer" if ratio > 1.0 else "less"


def _ops(found: Difference, top: int) -> str:
    """Two lines each: the times, and below how they were matched and where they are."""
    if not found.ops:
        return no_changed_ops(found)
    shown = found.ops[:top]
    before_s, after_s = other_kernel_seconds(found, shown)
    left = len(found.ops) - len(shown)
    figures = [
        [
            counts(change),
            seconds(change.before_s),
            seconds(change.after_s),
            _signed_seconds(change.change_s),
            relative(change),
        ]
        for change in shown
    ]
    other_s = after_s - before_s
    figures.append(["", seconds(before_s), seconds(after_s), _signed_seconds(other_s), _share(other_s, before_s)])
    headers = ["ops", "before", "after", "change", "in %"]
    room = WIDTH - sum(2 + max(map(len, column)) for column in zip(headers, *figures, strict=True))
    keys = [_fit_name(*change_name(change), max(NARROWEST_KEY, room)) for change in shown] + ["all other kernels"]
    rows = [[name, *row] for name, row in zip(keys, figures, strict=True)]
    heading, rule, *lines = table(["op that changed", *headers], rows).splitlines()
    told = [heading, rule]
    for line, change in zip(lines, shown, strict=False):
        told += [line, wrap_text(f"    {_details(change)}", 4)]
    told.append(lines[-1])
    if left:
        told.append(f"{left} more changed; --top {len(found.ops)} shows all.")
    return "\n".join(told)


def _fit_name(name: str, phase: str, room: int) -> str:
    return f"{elide(name, room - len(phase) - 1)} {phase}".rstrip()


def _details(change: OpChange) -> str:
    facts = [relation_text(change)]
    if change.module:
        facts.append(elide_start(change.module, 50))
    if change.source:
        facts.append(elide_start(change.source, 40))
    if change.noise is not None:
        facts.append(f"noise {percent(change.noise)}")
    return "; ".join(facts)


def _modules(changes: Sequence[OpChange]) -> str:
    """The sums by module, where one has several."""
    groups: dict[str, list[OpChange]] = {}
    for change in changes:
        groups.setdefault(change.module, []).append(change)
    if len(groups) < 2 or all(len(group) < 2 for group in groups.values()):
        return ""
    ranked = sorted(groups.items(), key=lambda item: -abs(sum(change.change_s for change in item[1])))
    rows = []
    for module, group in ranked[:5]:
        before_s, after_s = sum(change.before_s for change in group), sum(change.after_s for change in group)
        rows.append(
            [
                elide_start(module, 40) or "(none)",
                seconds(before_s),
                seconds(after_s),
                _signed_seconds(after_s - before_s),
            ]
        )
    return table(["module of these", "before", "after", "change"], rows)


def _findings(title: str, sign: str, findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    lines = [f"{title}:"]
    lines += [wrap_text(f"{sign} {finding_text(finding)}", 2) for finding in findings]
    return "\n".join(lines)


def finding_text(finding: Finding) -> str:
    """One finding in one line."""
    where = elide_start(finding.source) or elide_start(finding.module) or "the step"
    saving = f"{seconds(finding.saving_s)}, {percent(finding.share)}"
    return f"{plain(finding.rule, 40)} at {where} ({saving}): {plain(finding.title)}"


def _run(run: RunSummary, name: str) -> str:
    source = plain(run.source.replace("\\", "/").rpartition("/")[2], 30)
    facts = [elide_start(name, 40), "" if name.endswith(source) else source]
    facts += [plain(run.date[:16].replace("T", " "), 16), plain(run.device, 30)]
    if run.steps:
        apart = f" {percent(run.spread)} apart" if run.spread is not None and run.steps > 1 else ""
        facts.append(f"{run.steps} clean step{'' if run.steps == 1 else 's'}{apart}")
    else:
        facts.append("no clean steps")
    return ", ".join(fact for fact in facts if fact)


def _name_list(names: Sequence[str], most: int) -> str:
    short = [elide(short_name(name), LONGEST_NAME) for name in names[:most]]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(short) + more


def _signed_seconds(value: float) -> str:
    return "0 s" if not value else ("+" if value > 0 else "-") + seconds(abs(value))


def _share(value: float, whole: float) -> str:
    return signed_percent(value / whole) if whole else "-"


def _labeled(name: str, line: str, style: Style, color: Color = "bold") -> str:
    label = f"{name + ':':{LABEL}}"
    return style.paint(f"{name}:", color) + wrap_text(label + line, LABEL)[len(name) + 1 :]
