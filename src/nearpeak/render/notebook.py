"""A timing, an estimate and a profile as a fragment of HTML for a notebook.

A fragment has no script, no style sheet, no id and no link, so that it neither changes the page that it is shown in nor
needs anything from it. It has no colors of its own: what is drawn has the color of the text, on a light page and on a
dark one. All text from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nearpeak.bound.estimate import Estimate
from nearpeak.measure.timing import Timing
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.profile import Profile
from nearpeak.render.html.markup import Markup, element, joined, visible, visible_lines
from nearpeak.render.views.estimate import CEILINGS
from nearpeak.render.views.profile import MOST_FINDINGS, select_findings
from nearpeak.render.views.timing import MEANINGS, kernel_name, rates
from nearpeak.render.views.verdict import sentences
from nearpeak.units import percent, quantity, seconds, seconds_between

MOST_FAMILIES = 8
_CARD = (
    "border:1px solid rgba(128,128,128,.5);border-radius:6px;padding:.6em .9em;margin:.3em 0;max-width:60em;"
    "overflow-x:auto"
)
_TABLE = "border-collapse:collapse;margin:.5em 0;background:none;color:inherit;font:inherit"
_TEXT = "text-align:left;padding:.1em 1em .1em 0;vertical-align:top;white-space:normal"
_NUMBER = "text-align:right;padding:.1em 1em .1em 0;vertical-align:top;white-space:nowrap"
_QUIET = "opacity:.75"
_NO_MATHEMATICS = "tex2jax_ignore mathjax_ignore"
"""Names of ops and files may have dollar signs in them, and a notebook would typeset what is between two."""


def card(result: Profile | Estimate | Timing) -> str:
    """What a notebook shows for a result."""
    if isinstance(result, Profile):
        return profile_html(result)
    return estimate_html(result) if isinstance(result, Estimate) else timing_html(result)


def profile_html(profile: Profile) -> str:
    """Verdict, why and next; the waterfall as bars; the findings."""
    found = select_findings(profile)
    grade = grade_profile(profile)
    measured = f"Grade {grade.letter}{_in_brackets('; '.join(grade.reasons))}. "
    measured += f"Modeled: {percent(profile.modeled_share)} of the time in which kernels ran."
    return _card(
        f"Profile of {visible(profile.source, 80)}",
        f"{visible(profile.device, 80)}, {visible(profile.date, 40)}",
        _facts(sentences(profile, found)),
        _waterfall(profile),
        *_findings(found),
        _quiet(measured),
        *(_quiet(visible(note)) for note in profile.notes),
    )


def estimate_html(estimate: Estimate) -> str:
    """The three floors as bars, what good kernels take, and the families of ops that take most."""
    longest = max(estimate.as_written_s, estimate.expected_s or 0.0)
    times = {
        "as written": (estimate.as_written_s, "every op at its own roofline"),
        "fused": (estimate.fused_s, "intermediates that need not reach memory do not"),
        "ideal": (estimate.ideal_s, "inputs, parameters and results cross memory once"),
    }
    if estimate.expected_s is not None:
        whose = f"no floor: kernels as measured on {visible(estimate.expected_from, 40)}"
        times = {"expected": (estimate.expected_s, whose), **times}
    floors = [
        (name, seconds(time), _bar(0.0, time / longest if longest else 0.0), meaning)
        for name, (time, meaning) in times.items()
    ]
    coverage = f"Modeled: {percent(estimate.coverage.seconds_share)} of the as-written time."
    if estimate.coverage.unmodeled:
        names = [f"{visible(name, 60)} x{count}" for name, count in list(estimate.coverage.unmodeled.items())[:6]]
        coverage += f" Without a formula: {', '.join(names)}."
    if estimate.truncated:
        coverage += " The trace stopped at its limit: these are figures of its beginning."
    return _card(
        f"Estimate on {visible(estimate.machine, 60)}",
        f"{CEILINGS.get(estimate.how, visible(estimate.how, 40))}: {_count(len(estimate.ops), 'op')}, "
        f"{quantity(estimate.flops, 'FLOP')}, {quantity(estimate.bytes, 'B')}",
        _table(["", "time", "", ""], floors, "lrll"),
        _table(["family", "ops", "as written", "share"], _families(estimate), "lrrr"),
        _quiet(coverage),
        *(_quiet(visible(note)) for note in estimate.notes),
    )


def timing_html(timing: Timing) -> str:
    """The time with its interval and grade, how near its bound it is, the other times, and what is doubtful."""
    parameters = " ".join(f"{visible(name, 30)}={visible(value, 40)}" for name, value in timing.parameters.items())
    partial = ", interrupted" if timing.partial else ""
    others = [
        (visible(kind, 20), seconds(value), MEANINGS.get(kind, "")) for kind, value in timing.other_seconds.items()
    ]
    flags = [
        (flag.severity, visible(flag.name, 40), visible(f"{flag.evidence}. {flag.remedy}")) for flag in timing.flags
    ]
    environment = timing.environment
    driver = f", driver {visible(environment.driver, 40)}" if environment.driver else ""
    return _card(
        f"{visible(timing.name, 80) or 'unnamed'} {parameters}".rstrip(),
        f"{timing.kind} time ({MEANINGS[timing.kind]}), {timing.cache} cache; "
        f"median of {_count(len(timing.blocks), 'block')}",
        element(
            "div",
            element("b", seconds_between(timing.seconds, timing.low, timing.high)),
            f", grade {timing.grade}{partial}",
        ),
        _facts(_timing_facts(timing)),
        _table(["other time", "per call", "meaning"], others, "lrl") if others else "",
        _table(["", "flag", "evidence and remedy"], flags, "lll") if flags else "",
        _quiet(
            f"{visible(environment.device, 80)}{driver}, torch {visible(environment.torch, 40)}, "
            f"{visible(environment.date, 40)}; {visible(timing.method)}"
        ),
    )


def _timing_facts(timing: Timing) -> Mapping[str, str | Markup]:
    facts: dict[str, str | Markup] = {}
    share = timing.share_of_bound
    if share is not None:
        line = (
            f"{percent(share)} of the {visible(timing.bound_limiter or '', 20)} bound {seconds(timing.bound_seconds)}"
        )
        facts["Bound"] = joined(line, _bar(0.0, share))
    elif timing.work is not None:
        facts["Bound"] = "none: this machine is not calibrated. Run nearpeak machine --calibrate."
    reached = [quantity(rate, unit) for rate, unit in zip(rates(timing), ("B/s", "FLOP/s"), strict=True) if rate]
    if reached:
        facts["Reached"] = " and ".join(reached)
    if timing.cpu_bound:
        facts["CPU-bound"] = "called in a loop it runs at the host's pace"
    if timing.kernels:
        names = list(dict.fromkeys(kernel_name(kernel) for kernel in timing.kernels))
        more = ", ..." if len(names) > 4 else ""
        facts["Kernels"] = f"{len(timing.kernels)}: {', '.join(names[:4])}{more}"
    return facts


def _families(estimate: Estimate) -> list[Sequence[str]]:
    totals: dict[str, tuple[int, float]] = {}
    for op in estimate.ops:
        count, time = totals.get(op.family, (0, 0.0))
        totals[op.family] = count + 1, time + op.seconds
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    return [
        (visible(family, 40), f"{count:,}", seconds(time), percent(time / estimate.as_written_s))
        for family, (count, time) in ranked[:MOST_FAMILIES]
        if time > 0.0
    ]


def _waterfall(profile: Profile) -> Markup:
    """Each bar begins where the one before it ended."""
    rows: list[Sequence[str]] = []
    reached = 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        bar: str = _bar(reached, share)
        if part in profile.waterfall.broken:
            bar = "below zero: a bound of nearpeak's is wrong"
        rows.append((part.name, seconds(part.seconds), percent(share), bar))
        reached += share
    rows.append(("wall", seconds(profile.wall_s), percent(1.0), ""))
    return _table(["part", "time", "share", ""], rows, "lrrl")


def _findings(found: Sequence[Finding]) -> Iterable[Markup]:
    if not found:
        yield _quiet("No finding saves enough to be shown.")
        return
    yield element("div", element("b", "Findings, by what they would save"), style="margin-top:.5em")
    for number, finding in enumerate(found[:MOST_FINDINGS], 1):
        where = visible(finding.source, 80) or visible(finding.module, 80) or "the step"
        places = f", {finding.places} places" if finding.places > 1 else ""
        saving = f"{seconds(finding.saving_s)}, {percent(finding.share)}"
        yield element(
            "details",
            element("summary", f"{number}. {saving}: {visible(finding.rule, 60)} at {where}{places}"),
            element("div", visible(f"{finding.title} {finding.evidence} {finding.reasoning}", 2000)),
            element("pre", visible_lines(finding.remedy.strip("\n")), style="background:none;margin:.3em 0 .3em 1em"),
            element("div", f"nearpeak has it: {visible(finding.fix.usage)}") if finding.fix else "",
        )
    if len(found) > MOST_FINDINGS:
        rest = sum(finding.saving_s for finding in found[MOST_FINDINGS:])
        yield _quiet(f"and {len(found) - MOST_FINDINGS} more, {seconds(rest)} together")


def _card(title: str, below: str, *parts: str | Markup) -> str:
    head = element("div", element("b", title), element("div", below, style=_QUIET))
    return str(element("div", head, *parts, class_=_NO_MATHEMATICS, style=_CARD))


def _facts(facts: Mapping[str, str | Markup]) -> Markup:
    return _table([], [(element("b", name), told) for name, told in facts.items()], "ll") if facts else Markup()


def _table(headers: Sequence[str], rows: Iterable[Sequence[str | Markup]], alignment: str) -> Markup:
    styles = [_NUMBER if letter == "r" else _TEXT for letter in alignment]
    head = element("tr", *(element("th", text, style=style) for text, style in zip(headers, styles, strict=False)))
    body = [
        element("tr", *(element("td", cell, style=style) for cell, style in zip(row, styles, strict=True)))
        for row in rows
    ]
    return element("table", head if any(headers) else "", *body, style=_TABLE)


def _bar(begin: float, length: float) -> Markup:
    """A bar from `begin` to `begin + length` of the width, in the color of the text."""
    left = min(max(begin, 0.0), 1.0)
    width = min(max(length, 0.0), 1.0 - left)
    inner = element(
        "div",
        style=f"margin-left:{100 * left:.2f}%;width:{100 * width:.2f}%;height:.8em;background:currentColor;opacity:.55",
    )
    return element("div", inner, style="min-width:16em;margin-top:.3em")


def _quiet(line: str) -> Markup:
    return element("div", line, style=_QUIET)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
