"""The timeline of a profile as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Kernels are on the tracks of their streams, with the figures of their ops; idle times are on a track of their own, with
their causes; findings are marks at their first kernel.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nearpeak.errors import UsageError
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.idle import CAUSE_MEANINGS
from nearpeak.profiles.profile import DeviceKernel, Profile, ProfiledOp
from nearpeak.render.html.markup import visible
from nearpeak.render.text import short_name

PROCESS = 1
FINDINGS, IDLE, FIRST_STREAM = 1, 2, 3
"""Tracks, from the top."""

Event = dict[str, Any]


def trace_json(profile: Profile, findings: Sequence[Finding]) -> str:
    """The file. UsageError where a profile has no timeline."""
    if not profile.timeline:
        raise UsageError(
            f"the profile of {visible(profile.source, 80)} has no timeline, so there is nothing to show in Perfetto. "
            "An older nearpeak made it: profile again."
        )
    facts = {
        "source": visible(profile.source),
        "device": visible(profile.device),
        "machine": visible(profile.machine),
        "date": visible(profile.date),
        "clean_step_us": _microseconds(profile.wall_s),
        "grade": grade_profile(profile).letter,
    }
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(profile, findings))
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(facts)},"traceEvents":[\n{events}\n]}}\n'


def _events(profile: Profile, findings: Sequence[Finding]) -> Iterator[Event]:
    spans = sorted(profile.timeline, key=lambda span: (span.start_s, -span.seconds))
    tracks = _tracks(spans, "ops" if profile.device == "cpu" else "")
    names = {FINDINGS: "findings", IDLE: "nothing runs", **dict(tracks.values())}
    yield _name_event("process_name", PROCESS, 0, f"a step on {visible(profile.device, 60)}")
    for track, name in names.items():
        yield _name_event("thread_name", PROCESS, track, name)
        yield {**_metadata_event("thread_sort_index", PROCESS, track), "args": {"sort_index": track}}
    rules = _rules_by_op(findings)
    op_args: dict[int, Event] = {}
    for number, span in enumerate(spans):
        args: Event = {"kernel": visible(span.name)}
        name = visible(span.name, 120)
        if span.op is not None and 0 <= span.op < len(profile.ops):  # a file may say anything
            if span.op not in op_args:
                op_args[span.op] = _op_arguments(profile.ops[span.op], rules.get(span.op, ""))
            args = {**op_args[span.op], **args}
            name = visible(short_name(profile.ops[span.op].name), 120)
        category = "communication" if span.communication else "kernel"
        yield _complete_event(name, category, span.start_s, span.seconds, tracks[number][0], args)
    for gap in profile.gaps:
        args = {"why": CAUSE_MEANINGS.get(gap.cause, gap.cause)} | ({"where": visible(gap.where)} if gap.where else {})
        yield _complete_event(gap.cause, "idle", gap.start_s, gap.seconds, IDLE, args)
    first = _first_starts(spans)
    trusted = grade_profile(profile).is_trusted
    for finding in findings:
        start_s = min((first[op] for op in finding.ops if op in first), default=spans[0].start_s)
        yield _instant_event(finding, start_s, with_saving=trusted)


def _tracks(spans: Sequence[DeviceKernel], name: str) -> Mapping[int, tuple[int, str]]:
    """The track of each span with its name, by the number of the span; `name` is that of all, streams where it is "".

    A viewer cannot show overlapping spans on a track: they get a further track.
    """
    streams: dict[int, tuple[list[tuple[int, int]], list[int]]] = {}
    """Of each stream, the lanes in use by their ends, and the free ones: both are heaps."""
    lanes = []
    for span in spans:
        begin, end = _nanoseconds(span.start_s), _nanoseconds(span.start_s + span.seconds)
        used, free = streams.setdefault(span.stream, ([], []))
        while used and used[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(used)[1])
        lane = heapq.heappop(free) if free else len(used)
        heapq.heappush(used, (end, lane))
        lanes.append((span.stream, lane))
    order = {key: FIRST_STREAM + place for place, key in enumerate(sorted(set(lanes)))}
    return {
        number: (order[key], (name or f"stream {key[0]}") + (f", beside ({key[1]})" if key[1] else ""))
        for number, key in enumerate(lanes)
    }


def _rules_by_op(findings: Sequence[Finding]) -> dict[int, str]:
    """The rules of the findings of each op, by its index."""
    by_op: dict[int, list[str]] = {}
    for finding in findings:
        for op in finding.ops:
            by_op.setdefault(op, []).append(visible(finding.rule, 60))
    return {op: ", ".join(dict.fromkeys(rules)) for op, rules in by_op.items()}


def _op_arguments(op: ProfiledOp, rules: str) -> Event:
    """The figures of an op. Times are sums over its kernels."""
    args: Event = {
        "op": visible(op.name),
        "module": visible(op.module),
        "source": visible(op.source),
        "phase": visible(op.phase),
        "shapes": visible(", ".join("x".join(map(str, shape)) or "()" for shape in op.shapes[:12]), 120),
        "measured_us": _microseconds(op.measured_s),
        "bound_us": _microseconds(op.bound_s) if op.modeled else None,
        "expected_us": None if op.expected_s is None else _microseconds(op.expected_s),
        "lost_us": _microseconds(op.lost_s) if op.modeled else None,
        "limiter": visible(op.limiter) if op.modeled else None,
        "kernels_of_op": op.kernels if op.kernels > 1 else None,
        "findings": rules or None,
    }
    return {name: value for name, value in args.items() if value not in (None, "")}


def _first_starts(spans: Sequence[DeviceKernel]) -> dict[int, float]:
    first: dict[int, float] = {}
    for span in spans:
        if span.op is not None:
            first.setdefault(span.op, span.start_s)
    return first


def _instant_event(finding: Finding, start_s: float, *, with_saving: bool) -> Event:
    args = {
        "title": visible(finding.title, 1000),
        "where": visible(finding.source or finding.module),
        **(
            {"saving_us": _microseconds(finding.saving_s), "share_percent": round(100 * finding.share, 2)}
            if with_saving
            else {}
        ),
        "evidence": visible(finding.evidence, 1000),
        "remedy": visible(finding.remedy, 1000),
    }
    return {
        "ph": "i",
        "s": "t",
        "name": visible(finding.rule, 60),
        "cat": "finding",
        "ts": _nanoseconds(start_s) / 1000,
        "pid": PROCESS,
        "tid": FINDINGS,
        "args": args,
    }


def _complete_event(name: str, category: str, start_s: float, seconds: float, track: int, args: Event) -> Event:
    """An event with a duration. Start and end are rounded alike, so that the next event never begins before the end."""
    begin, end = _nanoseconds(start_s), _nanoseconds(start_s + seconds)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "pid": PROCESS,
        "tid": track,
        "args": args,
    }


def _name_event(kind: str, process: int, track: int, name: str) -> Event:
    return {**_metadata_event(kind, process, track), "args": {"name": name}}


def _metadata_event(kind: str, process: int, track: int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
