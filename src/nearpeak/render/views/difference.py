"""The difference of two profiles as a document: the verdict, the waterfalls side by side, and what changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nearpeak.diffs.difference import Difference, OpChange, RunSummary
from nearpeak.diffs.gate import Gate
from nearpeak.ops.op import origin_of_name
from nearpeak.profiles.finding import Finding
from nearpeak.render.document import Block, Cell, Color, Document, Fact, Facts, Items, Name, Paragraph, Table
from nearpeak.render.text import elide, elide_start, plain, short_name, signed_percent
from nearpeak.units import gibibytes, percent, seconds

TOP = 12
LABEL = 9
MOST_ROWS = 60
MOST_FINDINGS = 20
MOST_NAMES = 4
LONGEST_NAME = 36
NOISY = 0.05
"""With more noise than this, no change says little."""
DRIFT_SHOWN = 0.005
"""A smaller drift explains nothing that is shown."""
STEP_AND_WALL = 0.005
"""Where the median step and the wall time of a report are further apart, the reader will wonder."""
MEMORY_CHANGE = 0.005
MARKER = "<!-- nearpeak diff -->"
"""The first line of a comment on a pull request, by which a workflow finds its own comment again."""
_COLORS: dict[str, Color] = {"slower": "red", "faster": "green", "same": "bold", "different programs": "yellow"}


def document(
    difference: Difference, top: int = TOP, *, names: tuple[str, str] = ("", ""), gate: Gate | None = None
) -> Document:
    """The whole report. `names` are what the user calls the two runs."""
    titles = {
        "same": "no change of the step that noise does not explain",
        "slower": f"the step is slower, {signed_percent(difference.change)}",
        "faster": f"the step is faster, {signed_percent(difference.change)}",
        "different programs": "the runs are of different programs",
    }
    return Document(
        title=f"nearpeak: {titles[difference.verdict]}",
        parts=tuple(_parts(difference, top, names, gate)),
        is_titled=False,
        is_comment=True,
    )


def _parts(difference: Difference, top: int, names: tuple[str, str], gate: Gate | None) -> Iterator[Block]:
    runs = zip(("Before:", "After:"), (difference.before, difference.after), names, strict=True)
    yield Facts(
        facts=(
            Fact(label="Verdict:", text=verdict(difference), color=_COLORS[difference.verdict]),
            *(Fact(label=label, text=_run(run, name), color="bold") for label, run, name in runs),
        ),
        width=LABEL,
    )
    if gate is not None:
        yield Paragraph(text=f"Gate {gate.outcome}: {gate.reason}.")
    yield _waterfalls(difference)
    yield (
        _ops(difference, min(top, MOST_ROWS))
        if difference.ops
        else Paragraph(
            text="No op changed beyond noise." if difference.steady else "Ops are not compared: the runs are too noisy."
        )
    )
    yield _modules(difference.ops)
    yield _idle(difference)
    yield from _memory(difference)
    yield from _findings("New findings:", "+ ", difference.appeared)
    yield from _findings("Findings that are gone:", "- ", difference.gone)
    remarks = tuple(_remarks(difference))
    if remarks:
        yield Items(items=remarks, hanging=0, spaced=True)


def verdict(difference: Difference) -> str:
    """Whether the step changed, by how much, and whether that is real, in one sentence."""
    before_s, after_s = difference.before.step_s, difference.after.step_s
    times = f"{seconds(after_s)} a step against {seconds(before_s)}, {signed_percent(difference.change)}"
    if difference.verdict == "different programs":
        first, second = (percent(share, 0) for share in difference.common_shares)
        return (
            f"These are different programs: ops that both have take {first} of the kernel time of the first and "
            f"{second} of that of the second. {seconds(after_s)} a step against {seconds(before_s)} is no change of "
            "one program."
        )
    noise = percent(math.expm1(difference.noise))
    if difference.by_clock:
        return (
            f"The same, as far as the clock lets tell: {times}. Runs of the same code differ by {noise}; what is "
            "beyond that is in no op and no idle time, and may be the clock of the GPU."
        )
    if difference.verdict == "same" and (difference.noise > NOISY or abs(difference.change) > NOISY):
        return f"Too noisy to tell: {times}, where these runs may differ by {noise} by chance."
    if difference.verdict == "same":
        return f"The same, as far as noise lets tell: {times}, where runs of the same code differ by up to {noise}."
    real = f"more than the {noise} by which runs of the same code differ"
    if difference.explained and abs(math.log(difference.ratio)) <= difference.noise:
        real = f"within the {noise} by which runs of the same code differ, but ops that really changed account for it"
    return f"{difference.verdict.capitalize()}: {times}, {real}."


def _waterfalls(difference: Difference) -> Table:
    """The waterfalls side by side."""
    before_s, after_s = difference.before.wall_s, difference.after.wall_s
    rows: list[tuple[str, ...]] = [
        (part.name, *_times(part.before_s, part.after_s), _share(part.change_s, before_s))
        for part in difference.parts
        if part.before_s or part.after_s
    ]
    rows.append(("wall", *_times(before_s, after_s), _share(after_s - before_s, before_s)))
    return Table(headers=("part", "before", "after", "change", "of the step"), rows=tuple(rows))


def _times(before_s: float, after_s: float) -> tuple[str, str, str]:
    change = after_s - before_s
    sign = "+" if change > 0 else "-"
    return seconds(before_s), seconds(after_s), f"{sign}{seconds(abs(change))}" if change else "0 s"


def _ops(difference: Difference, top: int) -> Table:
    """The times of each op, and below how both runs were matched and where it is."""
    shown = difference.ops[:top]
    rows: list[tuple[Cell, ...]] = [
        (
            _change_name(change),
            _counts(change),
            *_times(change.before_s, change.after_s),
            _relative(change),
            _details(change),
        )
        for change in shown
    ]
    before_s = max(0.0, difference.before.kernel_s - sum(change.before_s for change in shown))
    after_s = max(0.0, difference.after.kernel_s - sum(change.after_s for change in shown))
    rows.append(("all other kernels", "", *_times(before_s, after_s), _share(after_s - before_s, before_s), ""))
    left = len(difference.ops) - len(shown)
    return Table(
        headers=("op that changed", "ops", "before", "after", "change", "in %", "how and where"),
        rows=tuple(rows),
        align="lrrrrrl",
        below=6,
        note=f"{left} more changed; --top {len(difference.ops)} shows all." if left else "",
    )


def _change_name(change: OpChange) -> Name:
    """What ran, or what now does, in a few words, and its phase."""
    names = change.names_after or change.names_before
    fused = sum(origin_of_name(name) == "inductor" for name in names)
    short = f"{len(names)} kinds of kernels" if fused > 2 else _name_list(names, 2)
    return Name(short, plain(change.phase, 10))


def _counts(change: OpChange) -> str:
    is_same = change.count_before == change.count_after
    return f"{change.count_after}" if is_same else f"{change.count_before}>{change.count_after}"


def _relative(change: OpChange) -> str:
    """The change of its time over what it was."""
    if not change.before_s:
        return "new"
    return "gone" if not change.after_s else signed_percent(change.after_s / change.before_s - 1.0)


def _details(change: OpChange) -> str:
    facts = [_relation_text(change)]
    if change.module:
        facts.append(elide_start(change.module, 50))
    if change.source:
        facts.append(elide_start(change.source, 40))
    if change.noise is not None:
        facts.append(f"noise {percent(change.noise)}")
    return "; ".join(facts)


def _relation_text(change: OpChange) -> str:
    """How the ops of both runs were matched, in a few words."""
    before, after = (_name_list(names, MOST_NAMES) for names in (change.names_before, change.names_after))
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


def _modules(changes: Sequence[OpChange]) -> Table:
    """The sums by module, where one has several."""
    groups: dict[str, list[OpChange]] = {}
    for change in changes:
        groups.setdefault(change.module, []).append(change)
    if len(groups) < 2 or all(len(group) < 2 for group in groups.values()):
        groups = {}
    ranked = sorted(groups.items(), key=lambda item: -abs(sum(change.change_s for change in item[1])))
    rows = tuple(
        (
            elide_start(module, 40) or "(none)",
            *_times(sum(change.before_s for change in group), sum(change.after_s for change in group)),
        )
        for module, group in ranked[:5]
    )
    return Table(headers=("module of these", "before", "after", "change"), rows=rows)


def _idle(difference: Difference) -> Table:
    """The causes of idle time that changed."""
    rows = tuple(
        (
            change.cause,
            *_times(change.before_s, change.after_s),
            f"{change.count_before}>{change.count_after}",
            Name(change.where, change.what, "start"),
        )
        for change in difference.idle
    )
    return Table(headers=("idle because of", "before", "after", "change", "times", "where"), rows=rows, align="lrrrrl")


def _memory(difference: Difference) -> Iterator[Paragraph]:
    """The peak of memory in both runs, where both measured it."""
    before, after = difference.before.peak_bytes, difference.after.peak_bytes
    if not before or after is None:
        return
    change = after / before - 1.0
    text = f"Memory: {gibibytes(after)} at the peak, as before."
    if abs(change) >= MEMORY_CHANGE:
        text = f"Memory: {gibibytes(after)} at the peak, {gibibytes(before)} before: {signed_percent(change)}."
    yield Paragraph(text=text)


def _findings(title: str, marker: str, findings: Sequence[Finding]) -> Iterator[Items]:
    items = [_finding_text(finding) for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        items.append(f"and {len(findings) - MOST_FINDINGS} more")
    if items:
        yield Items(title=title, items=tuple(items), marker=marker)


def _finding_text(finding: Finding) -> str:
    where = elide_start(finding.source) or elide_start(finding.module) or "the step"
    return f"{plain(finding.rule, 40)} at {where} ({finding.saving_text}): {plain(finding.title)}"


def _remarks(difference: Difference) -> Iterator[str]:
    """What to know about the comparison, a sentence or two each."""
    yield from (f"Not comparable without care: {plain(doubt)}." for doubt in difference.doubts)
    yield from map(plain, difference.notes)
    on_gpu = "cpu" not in (difference.before.device, difference.after.device)
    drift, clock = difference.drift, difference.clock
    if drift is not None and abs(drift - 1.0) >= DRIFT_SHOWN:
        yield (
            f"{'Kernels that wait for memory' if on_gpu else 'All ops'} take {_ratio_text(drift)} alike. Ops are named "
            "for what they changed beyond that."
        )
    if clock is not None and abs(clock - 1.0) >= DRIFT_SHOWN:
        yield (
            f"Kernels that compute take {_ratio_text(clock)}, as they do with another clock. Ops are named for what "
            "that does not explain."
        )
    runs = (difference.before, difference.after)
    if any(abs(run.step_s - run.wall_s) > STEP_AND_WALL * run.wall_s for run in runs):
        yield (
            "The verdict compares median steps. The wall time of the table is that of all clean steps over their "
            "number, with slow ones."
        )


def _ratio_text(ratio: float) -> str:
    return f"{percent(abs(ratio - 1.0))} {'longer' if ratio > 1.0 else 'less'}"


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


def _share(value: float, whole: float) -> str:
    return signed_percent(value / whole) if whole else "-"
