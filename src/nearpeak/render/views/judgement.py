"""A judgement as a document: the verdict, the charges, the times beside those of rivals, the kernels, the checks."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.judging.judgement import Check, Judgement, Rival, Speed, SuiteJudgement, geometric_mean
from nearpeak.render.document import (
    Block,
    CodeBlock,
    Document,
    Fact,
    Facts,
    Items,
    Name,
    Paragraph,
    Picture,
    Section,
    Table,
    Time,
)
from nearpeak.render.picture.bars import Bar, stacked_bars
from nearpeak.render.picture.svg import svg
from nearpeak.render.text import count
from nearpeak.units import percent, quantity, seconds, seconds_between, significant

LABEL = 14
MOST_PIECES, LEAST_SHARE = 5, 0.01
"""Of the picture of a call: smaller pieces cannot be seen, and their names take the place of others."""
KINDS = {
    "given": "given inputs",
    "gradients": "gradients",
    "sequence": "repeated calls",
    "sizes": "other sizes",
    "values": "shifted values",
    "range": "large or small values",
    "spikes": "spikes",
    "nonfinite": "NaN and -infinity",
    "infinity": "+infinity",
    "strides": "strides, offsets",
    "stream": "another stream",
    "graph": "CUDA graph",
    "autocast": "autocast",
    "timed": "timed calls",
}
"""Kinds of checks in the words of a report."""


def document(judgement: Judgement) -> Document:
    """The report of one judgement: the verdict first."""
    return Document(
        title=f"{judgement.candidate}: {verdict(judgement)}",
        facts=(f"against {judgement.reference}, in {seconds(judgement.seconds)}",),
        parts=tuple(_parts(judgement)),
    )


def verdict(judgement: Judgement) -> str:
    """ "accepted", "undecided", or "rejected" with the reason."""
    if judgement.is_accepted:
        return "ACCEPTED, right and honest"
    if judgement.is_undecided:
        return "UNDECIDED, times are missing"
    faults = [] if judgement.is_right else ["wrong"]
    faults += [] if judgement.is_honest else ["dishonest"]
    return f"REJECTED, {' and '.join(faults)}"


def _parts(judgement: Judgement) -> Iterator[Block]:
    for charge in judgement.charges:
        text = f"{charge.name} ({charge.fault}). {charge.meaning} Seen: {charge.evidence}."
        yield Paragraph(text=text, kind="bad", accent=(charge.name, "red"))
    if judgement.is_undecided:
        text = f"UNDECIDED. {judgement.untimed} Too few calls were timed to tell whether it is honest in them."
        yield Paragraph(text=text, kind="bad", accent=("UNDECIDED", "red"))
    yield Facts(facts=tuple(_facts(judgement)), width=LABEL)
    if judgement.speeds:
        yield Section(id="speed", title="How fast", blocks=tuple(_speed_blocks(judgement)), is_titled=True)
    if judgement.kernels:
        yield _kernels(judgement)
        yield Picture(title="The time of one call", svg=_kernel_picture(judgement))
    yield _checks(judgement.checks)
    if judgement.last_words.strip():
        yield Section(id="words", title="Last words", blocks=(CodeBlock(text=judgement.last_words),), is_titled=True)
    if judgement.notes:
        yield Items(items=judgement.notes, title="Notes", marker="- ")
    where = judgement.environment
    yield Paragraph(
        text=f"{where.device}, torch {where.torch}, {count(where.threads, 'thread')}; {where.date}",
        kind="small",
    )


def _facts(judgement: Judgement) -> Iterator[Fact]:
    outcomes = [check.outcome for check in judgement.checks]
    right = f"{outcomes.count('passed')} of {len(outcomes)} checks passed"
    differs, refused = outcomes.count("differs"), outcomes.count("refused")
    if differs:
        right += f", {differs} with another result where it may differ, such as for infinities"
    if refused:
        right += f", {refused} refused: the candidate raises an error there, and the reference does not"
    yield Fact(label="right", text=f"{'yes' if judgement.is_right else 'NO'}; {right}")
    honest = "not known" if judgement.is_undecided else "yes" if judgement.is_honest else "NO"
    yield Fact(label="honest", text=honest)
    if judgement.deterministic is not None:
        same = "the same bits at repeated calls" if judgement.deterministic else "other bits at repeated calls"
        yield Fact(label="deterministic", text=same)
    if judgement.bytes_held is not None:
        yield Fact(label="memory kept", text=f"{quantity(judgement.bytes_held, 'B')} between calls")
    libraries = sorted({kernel.library for kernel in judgement.kernels if kernel.library})
    if libraries:
        shares = ", ".join(
            f"{library} for {percent(sum(each.share for each in judgement.kernels if each.library == library), 0)}"
            for library in libraries
        )
        yield Fact(label="calls", text=f"{shares} of its time")
    for speed in judgement.speeds:
        if speed.share_of_bound is not None:
            text = (
                f"{percent(speed.share_of_bound)} of the {speed.bound_limiter} bound of {seconds(speed.bound_seconds)}"
            )
            yield Fact(
                label="of the limit", text=f"{text} ({speed.ceilings} figures)", share=min(1.0, speed.share_of_bound)
            )
    if judgement.speeds:
        yield from _speed_facts(judgement)
    else:
        yield Fact(label="speed", text="not measured; the notes say why" if judgement.notes else "not measured")


def _speed_facts(judgement: Judgement) -> Iterator[Fact]:
    words = {"FASTER": "faster than", "SLOWER": "slower than", "EQUIVALENT": "as fast as"}
    for speed in judgement.speeds:
        where = f" at {speed.sizes}" if len(judgement.speeds) > 1 else ""
        for rival in speed.rivals:
            if rival.ratio is None or rival.verdict is None:
                continue
            times = f"{rival.name}: {significant(1 / rival.ratio)} x{where}"
            text = f"{words[rival.verdict]} {times}" if rival.verdict in words else f"no clear difference from {times}"
            yield Fact(label="speed", text=text)
    if len(judgement.speedups) > 1:
        mean, worst = geometric_mean(judgement.speedups), min(judgement.speedups)
        text = f"{significant(mean)} x the reference in the geometric mean, {significant(worst)} x at worst"
        yield Fact(label="all sizes", text=text)


def _speed_blocks(judgement: Judgement) -> Iterator[Block]:
    for speed in judgement.speeds:
        yield _speed_table(speed)
        if speed.enqueue_seconds is not None:
            launch = f"The host takes {seconds(speed.enqueue_seconds)} to launch a call of the candidate."
            yield Paragraph(text=launch, kind="small")


def _speed_table(speed: Speed) -> Table:
    rows = [_row(speed.candidate, speed), *(_row(rival, speed) for rival in speed.rivals)]
    timing = speed.candidate.timing
    return Table(
        title=f"{speed.sizes}: {timing.kind} time per call",
        headers=("", "cold cache", "hot cache", "of limit", "candidate / this"),
        rows=tuple(rows),
        align="lrrrl",
        note=f"{timing.method}; in turns with the others, median of {count(len(timing.blocks), 'block')}",
    )


def _row(rival: Rival, speed: Speed) -> tuple[str | Time, ...]:
    timing = rival.timing
    share = speed.bound_seconds / timing.seconds if speed.bound_seconds and timing.seconds > 0 else None
    ratio = "-"
    if rival.ratio is not None and rival.low is not None and rival.high is not None:
        ratio = f"{significant(rival.ratio)} [{significant(rival.low)}, {significant(rival.high)}]"
    return (
        rival.name,
        seconds_between(timing.seconds, timing.low, timing.high),
        "-" if rival.hot_seconds is None else seconds(rival.hot_seconds),
        "-" if share is None else percent(share),
        ratio,
    )


def _kernels(judgement: Judgement) -> Table:
    rows = tuple(
        (Name(kernel.name), kernel.library or "its own", str(kernel.calls), percent(kernel.share), Time(kernel.seconds))
        for kernel in judgement.kernels
    )
    return Table(
        title="What runs in one call",
        headers=("kernel or operator", "of", "calls", "share", "time"),
        rows=rows,
        align="llrrr",
        bars=tuple(kernel.share for kernel in judgement.kernels),
        note="by torch's profiler, whose own time is in it",
    )


def _kernel_picture(judgement: Judgement) -> str:
    """One call as a bar of its kernels, beside the bound of the reference's work."""
    largest = [kernel for kernel in judgement.kernels[:MOST_PIECES] if kernel.share >= LEAST_SHARE]
    rest = sum(kernel.seconds for kernel in judgement.kernels[len(largest) :])
    pieces = [(kernel.name, kernel.seconds) for kernel in largest] + ([("others", rest)] if rest else [])
    bound = judgement.speeds[0].bound_seconds if judgement.speeds else None
    scene = stacked_bars(
        [Bar(name="one call", pieces=tuple(pieces))],
        title="Where one call of the candidate goes",
        subtitle=f"{judgement.candidate}, by torch's profiler",
        shown=seconds,
        limit=bound,
        limit_name="" if bound is None else f"bound {seconds(bound)}",
    )
    return svg(scene)


def _checks(checks: tuple[Check, ...]) -> Block:
    """One row for each kind of check; what failed or was refused, by itself."""
    rows = []
    for kind in dict.fromkeys(check.kind for check in checks):
        group = [check for check in checks if check.kind == kind]
        errors = [check.error for check in group if check.error is not None]
        ratios = [check.rms_ratio for check in group if check.rms_ratio is not None]
        passed = sum(check.outcome == "passed" for check in group)
        rows.append(
            (
                KINDS.get(kind, kind),
                f"{passed} of {len(group)}",
                f"{significant(max(errors), 2)}" if errors else "-",
                f"{significant(max(ratios), 2)}" if ratios else "-",
            )
        )
    table = Table(
        headers=("varied", "passed", "error / tolerance", "typical / reference's"),
        rows=tuple(rows),
        align="lrrr",
        note=(
            "the largest error over its tolerance, where 1 passes, and the root mean square error over that of the "
            "reference in its own dtype"
        ),
    )
    rest = [check for check in checks if check.outcome != "passed"]
    blocks: list[Block] = [table]
    if rest:
        items = tuple(f"{check.outcome}: {check.inputs}. {check.detail}" for check in rest[:20])
        more = len(rest) - len(items)
        blocks.append(Items(items=(*items, *([f"and {more} more"] if more else [])), title="Not passed", marker="- "))
    return Section(id="checks", title="How right", blocks=tuple(blocks), is_titled=True)


def suite_document(suite: SuiteJudgement) -> Document:
    """The report of a folder of candidates."""
    rows = tuple(
        (
            judgement.candidate,
            "accepted" if judgement.is_accepted else "undecided" if judgement.is_undecided else "REJECTED",
            significant(geometric_mean(judgement.speedups)) if judgement.speedups else "-",
            ", ".join(charge.name for charge in judgement.charges) or "-",
        )
        for judgement in suite.judgements
    )
    accepted = sum(judgement.is_accepted for judgement in suite.judgements)
    facts = []
    if suite.speedups:
        mean, worst = geometric_mean(suite.speedups), min(suite.speedups)
        facts.append(
            f"accepted ones: {significant(mean)} x the reference's speed in the geometric mean, "
            f"{significant(worst)} x at worst"
        )
    parts: list[Block] = [
        Table(headers=("candidate", "verdict", "x reference", "charges"), rows=rows, align="llrl"),
    ]
    if suite.failures:
        items = tuple(f"{name}: {reason}" for name, reason in suite.failures.items())
        parts.append(Items(items=items, title="Not judged", marker="- "))
    title = f"{suite.folder}: {accepted} of {len(suite.judgements)} accepted"
    return Document(title=title, facts=tuple(facts), parts=tuple(parts))
