"""`causes`: the time in which nothing ran on the device, as named causes that sum to it.

A gap between kernels ends with a kernel. Until that one was launched, the gap is the host's doing, and each instant of
it is charged to what the host was doing then. A synchronisation makes the host lose its lead: it is charged with what
the host did after it as well, for as long as it had made the host wait while the device was still busy. Without it the
host would have done that earlier by so much.

The gaps are those of a step under the profiler, which makes ops of the host take two to three times as long. It does
not make waiting, loading, allocating, collecting or compiling longer, nor long stretches of Python: these keep their
time, and what the host took for ops and between them gets the rest of the idle time of a clean step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from nearpeak.diagnose.intervals import Interval

Cause = Literal[
    "synchronisation",
    "input",
    "allocator",
    "garbage collection",
    "compilation",
    "profiler",
    "launching",
    "python",
    "unknown",
]
MEANINGS: Mapping[Cause, str] = {
    "synchronisation": "the host waited for the device, and had to catch up",
    "input": "the host waited for a data loader",
    "allocator": "the host asked the driver for memory",
    "garbage collection": "Python collected garbage",
    "compilation": "code was compiled, or a kernel loaded",
    "profiler": "the profiler itself; not in a run without it",
    "launching": "ops are launched more slowly than they run",
    "python": "the host ran code outside of any op",
    "unknown": "not seen in the profiled step",
}
_FIRST = ("profiler", "compilation", "garbage collection", "input", "allocator", "synchronisation")
"""What an instant is charged to where several are true, the most specific first."""
CLOCKS_APART = 5e-6
"""How much the clocks of host and device may differ."""
NOISE = 0.1
"""How much more idle time a clean step may have than the profiled one, relatively, to have it from the same causes."""
LONG_PYTHON = 2e-4
"""Seconds between two ops of the host that are code of its own; the profiler adds at most a tenth of it to an op."""
LATE = "launched late"
QUEUED = "between queued kernels"
BETWEEN_OPS = "between ops"
_SLOWED = (LATE, BETWEEN_OPS)
"""What takes longer under the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """Idle time of one cause."""

    cause: Cause
    seconds: float
    count: int
    """How often: calls of the host, or gaps."""
    where: str
    """The source line or module behind it; that with most of it where there are several; "" where it is not known. Of
    launching and Python, that of the op which came next."""
    what: str
    """The op or call, or the kind of gap."""


class Ran(NamedTuple):
    """Something that ran on the device, in seconds of any clock."""

    start_s: float
    end_s: float
    launched_s: float | None
    """When the host was done launching it; None where that is not known: then the host is charged until it starts."""
    where: str = ""


class Doing(NamedTuple):
    """What the host did, on the same clock."""

    cause: Cause
    start_s: float
    end_s: float
    where: str = ""
    what: str = ""


class _Gap(NamedTuple):
    start: float
    end: float
    ended_by: Ran | None


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    spans: set[int] = field(default_factory=set)
    places: dict[str, float] = field(default_factory=dict)


def causes(
    ran: Sequence[Ran],
    doing: Sequence[Doing],
    working: Sequence[Interval] | None,
    *,
    window: Interval,
    idle_s: float,
    clean: bool,
) -> tuple[IdleCause, ...]:
    """The causes of idle time, the largest first; they sum to `idle_s`.

    Args:
        ran: Everything on the device.
        doing: What the host did that is a cause.
        working: When the host was inside of an op or a launch, disjoint and in order. None where the host is the
            device, so that nothing is launched.
        window: From when to when the step went.
        idle_s: The idle time to explain.
        clean: Whether it is that of a step that ran without the profiler, unlike `ran`.

    >>> ran = [Ran(0.0, 3.0, 0.0), Ran(7.0, 9.0, 6.5)]
    >>> waited = Doing("synchronisation", 1.0, 3.5, "train.py:8", "item")
    >>> for cause in causes(ran, [waited], [(5.0, 7.0)], window=(0.0, 9.0), idle_s=4.0, clean=False):
    ...     print(cause.cause, cause.seconds, cause.where, cause.what)
    synchronisation 2.5 train.py:8 item
    launching 1.5  launched late
    """
    charged: dict[tuple[Cause, str, str], _Sum] = {}
    charge = _Charge(doing, working, charged)
    for number, gap in enumerate(_gaps(ran, window)):
        charge.gap(number, gap)
    found = [
        IdleCause(
            cause=cause,
            seconds=total.seconds,
            count=len(total.spans),
            where=where or max(total.places, key=lambda place: total.places[place], default=""),
            what=what,
        )
        for (cause, what, where), total in charged.items()
    ]
    return _fitted(found, idle_s, clean=clean)


class _Charge:
    """Charges gaps, in the order of time."""

    def __init__(
        self,
        doing: Sequence[Doing],
        working: Sequence[Interval] | None,
        charged: dict[tuple[Cause, str, str], _Sum],
    ) -> None:
        self._doing = doing
        self._charged = charged
        self._timeline = list(_timeline(doing))
        self._working = working
        self._waits = sorted(
            (span.start_s, index) for index, span in enumerate(doing) if span.cause == "synchronisation"
        )

    def gap(self, number: int, gap: _Gap) -> None:
        launched = gap.end if gap.ended_by is None or gap.ended_by.launched_s is None else gap.ended_by.launched_s
        where = "" if gap.ended_by is None else gap.ended_by.where
        until = min(max(launched, gap.start), gap.end)
        wait = self._wait_at(gap.start)
        lead = 0.0 if wait is None else gap.start - self._doing[wait].start_s
        for start, end, index in _cut(self._timeline, gap.start, until):
            if index is not None:
                self._span(index, end - start)
                continue
            caught_up = 0.0 if wait is None else min(lead, end - start)
            if wait is not None and caught_up > 0.0:
                self._span(wait, caught_up)
                lead -= caught_up
            self._host(number, start + caught_up, end, where)
        if gap.end > until:
            self._add("launching", LATE if until > gap.start else QUEUED, "", gap.end - until, number, where)

    def _wait_at(self, time: float) -> int | None:
        """The synchronisation during which the device ran out of work."""
        at = bisect_left(self._waits, (time, -1)) - 1
        if at < 0 or self._doing[self._waits[at][1]].end_s < time - CLOCKS_APART:
            return None
        return self._waits[at][1]

    def _host(self, number: int, start: float, end: float, where: str) -> None:
        """Time in which the host did nothing that has a name."""
        inside = 0.0
        if self._working is not None:
            inside = sum(
                last - first
                for first, last, index in _cut([(*span, 0) for span in self._near(start, end)], start, end)
                if index is not None
            )
        if inside > 0.0:
            self._add("launching", LATE, "", inside, number, where)
        outside = end - start - inside
        if outside >= LONG_PYTHON:
            self._add("python", "", where, outside, number, "")
        elif outside > 0.0:
            self._add("python", BETWEEN_OPS, "", outside, number, where)

    def _near(self, start: float, end: float) -> Sequence[Interval]:
        assert self._working is not None
        first = max(0, bisect_right(self._working, (start, math.inf)) - 1)
        return self._working[first : bisect_left(self._working, (end, -math.inf))]

    def _span(self, index: int, seconds: float) -> None:
        span = self._doing[index]
        self._add(span.cause, span.what, span.where, seconds, index, "")

    def _add(self, cause: Cause, what: str, where: str, seconds: float, number: int, place: str) -> None:
        total = self._charged.setdefault((cause, what, where), _Sum())
        total.seconds += seconds
        total.spans.add(number)
        if place:
            total.places[place] = total.places.get(place, 0.0) + seconds


def _gaps(ran: Sequence[Ran], window: Interval) -> Iterator[_Gap]:
    """When nothing ran, with what ended it."""
    covered, end = window
    for item in sorted(ran, key=lambda item: item.start_s):
        if item.start_s > covered:
            yield _Gap(covered, min(item.start_s, end), item)
        covered = max(covered, item.end_s)
        if covered >= end:
            return
    if end > covered:
        yield _Gap(covered, end, None)


def _timeline(doing: Sequence[Doing]) -> Iterator[tuple[float, float, int]]:
    """Disjoint pieces of time in order, each with the most specific of what the host did."""
    starts = sorted((span.start_s, index) for index, span in enumerate(doing) if span.end_s > span.start_s)
    times = sorted({time for span in doing for time in (span.start_s, span.end_s)})
    running: list[tuple[int, float, int]] = []
    at = 0
    for start, end in itertools.pairwise(times):
        while at < len(starts) and starts[at][0] <= start:
            index = starts[at][1]
            heapq.heappush(running, (_FIRST.index(doing[index].cause), starts[at][0], index))
            at += 1
        while running and doing[running[0][2]].end_s <= start:
            heapq.heappop(running)
        if running:
            yield start, end, running[0][2]


def _cut(
    pieces: Sequence[tuple[float, float, int]], start: float, end: float
) -> Iterator[tuple[float, float, int | None]]:
    """From `start` to `end` without holes: the pieces in there, and between them what belongs to none."""
    at = max(0, bisect_right(pieces, (start, math.inf, 0)) - 1)
    time = start
    while time < end:
        while at < len(pieces) and pieces[at][1] <= time:
            at += 1
        if at == len(pieces) or pieces[at][0] >= end:
            yield time, end, None
            return
        first, last, index = pieces[at]
        if first > time:
            yield time, first, None
            time = first
        yield time, min(last, end), index
        time = min(last, end)


def _fitted(found: Iterable[IdleCause], idle_s: float, *, clean: bool) -> tuple[IdleCause, ...]:
    """The causes with the seconds that they have of `idle_s`."""
    kept = [cause for cause in found if not (clean and cause.cause == "profiler")]
    slowed = [clean and cause.cause in ("launching", "python") and cause.what in _SLOWED for cause in kept]
    steady_s = sum(cause.seconds for cause, slow in zip(kept, slowed, strict=True) if not slow)
    slowed_s = sum(cause.seconds for cause, slow in zip(kept, slowed, strict=True) if slow)
    total = steady_s + slowed_s
    if idle_s > total:
        steady = slower = idle_s / total if total > 0.0 and idle_s <= total * (1.0 + NOISE) else 1.0
    else:
        steady = min(1.0, idle_s / steady_s) if steady_s > 0.0 else 1.0
        slower = max(0.0, idle_s - steady_s) / slowed_s if slowed_s > 0.0 else 0.0
    fitted = [
        replace(cause, seconds=cause.seconds * (slower if slow else steady))
        for cause, slow in zip(kept, slowed, strict=True)
    ]
    rest = idle_s - sum(cause.seconds for cause in fitted)
    if rest > 1e-9 * idle_s:
        fitted.append(IdleCause(cause="unknown", seconds=rest, count=0, where="", what=""))
    return tuple(sorted((cause for cause in fitted if cause.seconds > 0.0), key=lambda cause: -cause.seconds))
