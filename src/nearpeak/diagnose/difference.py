"""`difference`: what changed between two profiles of a step, by part and by op, and whether it is real.

Two runs of the same code never take the same time: a GPU is warmer, its clock is lower, memory lies elsewhere. What all
kernels have in common of that is their drift, the median ratio of the times of ops that are in both runs. An op has
changed when it changed by more than the drift, and by more than ops that are alike differ within each run. A step has
changed when its wall time did by more than runs of the same code differ, or when its ops did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from nearpeak.diagnose.findings import common_module
from nearpeak.diagnose.profile import Profile, ProfiledOp

Verdict = Literal["slower", "faster", "same"]
How = Literal["same op", "moved", "replaced", "only before", "only after"]

RUNS_DIFFER = 0.015
"""How much wall times of the same code differ from process to process, on a GPU that nobody else uses."""
KERNELS_DIFFER = 0.015
"""How much times of one kernel differ from run to run beside the drift of all, where no more is known."""
SURE = 3.0
"""Standard errors that a change must be away from none."""
LEAST_SHARE = 0.0005
"""Of the wall time: ops that change by less are not named."""
COMMON_SHARE = 0.5
"""Of the kernel time that must be in both runs, in ops that are alike, to speak of a drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """A part of the waterfall in both runs."""

    name: str
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        """Above zero where it takes longer now."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChange:
    """Ops that do the same work in both runs."""

    how: How
    verdict: Verdict
    name: str
    """The op, or what was replaced by what."""
    phase: str
    module: str
    source: str
    """The line in the later run, or in the earlier one where it is gone."""
    count_before: int
    count_after: int
    before_s: float
    after_s: float
    noise: float
    """The relative change that could be chance."""

    @property
    def change_s(self) -> float:
        """Above zero where they take longer now."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two profiles, the later against the earlier."""

    before: Profile
    after: Profile
    verdict: Verdict
    ratio: float
    """Of the wall times."""
    noise: float
    """The relative change of the wall time that could be chance."""
    drift: float | None
    """The ratio that kernels have in common; None where too few are in both runs."""
    parts: tuple[PartChange, ...]
    ops: tuple[OpChange, ...]
    """The largest change first, of those that are real."""
    notes: tuple[str, ...] = ()

    @property
    def change(self) -> float:
        """Of the wall time, relatively; above zero where it takes longer now."""
        return self.ratio - 1.0


def difference(before: Profile, after: Profile) -> Difference:
    """What changed from one profile to another."""
    pairs = list(_paired(before, after))
    alike = [pair for pair in pairs if pair.how in ("same op", "moved")]
    drift = _drift(alike, before.kernel_s)
    least_s = LEAST_SHARE * before.wall_s
    changes = [change for pair in pairs if (change := pair.judged(drift or 1.0, least_s))]
    ratio = after.wall_s / before.wall_s if before.wall_s else 1.0
    noise = RUNS_DIFFER + math.hypot(*(SURE * _error(profile.walls) for profile in (before, after)))
    explained_s = sum(change.change_s for change in changes)
    # A change of the step is real where it is beyond chance, or where ops say so that make up most of it.
    real = abs(math.log(ratio)) > noise or (
        abs(explained_s) > 0.5 * abs(after.wall_s - before.wall_s) and abs(explained_s) > 0.01 * before.wall_s
    )
    return Difference(
        before=before,
        after=after,
        verdict="same" if not real else "slower" if ratio > 1.0 else "faster",
        ratio=ratio,
        noise=noise,
        drift=drift,
        parts=tuple(
            PartChange(name=part.name, before_s=part.seconds, after_s=after.waterfall.seconds(part.name))
            for part in before.waterfall.parts
        ),
        ops=tuple(sorted(changes, key=lambda change: -abs(change.change_s))),
        notes=tuple(_notes(before, after)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    how: How
    before: Sequence[ProfiledOp]
    after: Sequence[ProfiledOp]

    @property
    def times(self) -> tuple[float, float]:
        return sum(op.measured_s for op in self.before), sum(op.measured_s for op in self.after)

    def judged(self, drift: float, least_s: float) -> OpChange | None:
        """The change, where it is real and large enough to be named."""
        before_s, after_s = self.times
        if abs(after_s - drift * before_s) < least_s:
            return None
        noise = KERNELS_DIFFER
        if self.how in ("same op", "moved"):
            noise += math.hypot(*(SURE * _error([op.measured_s for op in ops]) for ops in (self.before, self.after)))
            ratio = after_s / before_s if before_s else math.inf
            if abs(math.log(ratio / drift)) <= noise:
                return None
        one = (self.after or self.before)[0]
        return OpChange(
            how=self.how,
            verdict="slower" if after_s > drift * before_s else "faster",
            name=_named(self.before, self.after),
            phase=one.phase,
            module=common_module([op.module for op in self.after or self.before]),
            source=one.source,
            count_before=len(self.before),
            count_after=len(self.after),
            before_s=before_s,
            after_s=after_s,
            noise=noise,
        )


def _paired(before: Profile, after: Profile) -> Iterable[_Pair]:
    """Ops of both, from the surest match to the loosest.

    The same op in the same module on the same shapes; the same op and shapes anywhere, when modules got other names;
    and what is left of one module and phase, which replaces what was there: a fused kernel, say.
    """
    left = [_that_ran(before), _that_ran(after)]
    for how, key in _MATCHES:
        first, second = (_grouped(ops, key) for ops in left)
        left = [[], []]
        for one in dict.fromkeys((*first, *second)):
            here, there = first.get(one, []), second.get(one, [])
            if not here or not there:
                left[0] += here
                left[1] += there
            elif how == "replaced" or len(here) == len(there):
                yield _Pair(how=how, before=here, after=there)
            else:  # some of them are new, or gone
                shared = min(len(here), len(there))
                yield _Pair(how=how, before=here[:shared], after=there[:shared])
                left[0] += here[shared:]
                left[1] += there[shared:]
    for ops, where in ((left[0], "only before"), (left[1], "only after")):
        for group in _grouped(ops, lambda op: (op.name, op.phase, op.source)).values():
            gone = where == "only before"
            yield _Pair(
                how="only before" if gone else "only after", before=group if gone else [], after=[] if gone else group
            )


def _that_ran(profile: Profile) -> list[ProfiledOp]:
    return [op for op in profile.ops if op.kernels]


def _packet(op: ProfiledOp) -> str:
    return op.name.rpartition(".")[0] or op.name


def _kind(op: ProfiledOp) -> Hashable:
    """A module without the numbers in its path: layers of a model are alike."""
    path = tuple("*" if part.isdigit() else part for part in op.module.split("."))
    return _packet(op), op.phase, op.shapes, path


_MATCHES: tuple[tuple[How, Callable[[ProfiledOp], Hashable]], ...] = (
    ("same op", _kind),
    ("moved", lambda op: (_packet(op), op.phase, op.shapes)),
    ("replaced", lambda op: (op.phase, tuple("*" if part.isdigit() else part for part in op.module.split(".")))),
    ("replaced", lambda op: op.phase),
)


def _grouped(ops: Iterable[ProfiledOp], key: Callable[[ProfiledOp], Hashable]) -> dict[Hashable, list[ProfiledOp]]:
    found: dict[Hashable, list[ProfiledOp]] = {}
    for op in ops:
        found.setdefault(key(op), []).append(op)
    return found


def _drift(pairs: Sequence[_Pair], kernel_s: float) -> float | None:
    """The median ratio of ops that are in both runs, each weighted by its time."""
    known = sorted((after / before, before) for pair in pairs if (before := pair.times[0]) and (after := pair.times[1]))
    total = sum(weight for _, weight in known)
    if total < COMMON_SHARE * kernel_s or not total:
        return None
    passed = 0.0
    for ratio, weight in known:
        passed += weight
        if passed >= total / 2:
            return ratio
    return known[-1][0]


def _error(times: Sequence[float]) -> float:
    """The relative standard error of their mean."""
    mean = fmean(times) if times else 0.0
    return stdev(times) / mean / math.sqrt(len(times)) if len(times) > 1 and mean else 0.0


def _named(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> str:
    old, new = (_names(ops) for ops in (before, after))
    return new if old == new or not old else old if not new else f"{old} -> {new}"


def _names(ops: Sequence[ProfiledOp]) -> str:
    """Names with how often each is there, the one that takes longest first."""
    totals: dict[str, tuple[float, int]] = {}
    for op in ops:
        name = _packet(op).removeprefix("aten.")
        seconds, count = totals.get(name, (0.0, 0))
        totals[name] = seconds + op.measured_s, count + 1
    return ", ".join(sorted(totals, key=lambda name: -totals[name][0]))


def _notes(before: Profile, after: Profile) -> Iterable[str]:
    if before.device != after.device:
        yield f"The runs were on different devices: {before.device}, and {after.device}."
    elif before.machine != after.machine or before.how != after.how:
        yield "The bounds are against different ceilings, so parts of the waterfall changed with these too."
    for name, profile in (("first", before), ("second", after)):
        if not profile.walls:
            yield f"The {name} has no clean steps: its wall time is that of one step under the profiler."
