"""`CommRun`: what `nearpeak comm` measured, as plain data without torch, and its file.

The time of a call is that of its slowest rank. Ranks leave a collective together, so a rank that entered it earlier
took longer: the skew of a call is its longest time less its shortest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearpeak import _display
from nearpeak._files import read_json, write_file
from nearpeak._records import Amount, Count, Rate, Seconds, Share, brief, from_json, to_json
from nearpeak.comm.fit import SCATTER, CurveFit, fit_curve, regime_of
from nearpeak.errors import FileProblem
from nearpeak.measure.timing import Environment, Flag, Grade, grade_of
from nearpeak.units import quantity

SCHEMA = 1
KIND = "comm"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommPoint:
    """One operation at one size. `seconds` is the median over calls of the slowest rank's time."""

    op: str
    group: str
    ranks: Count
    concurrent: Count
    """Groups like this one that ran at the same time."""
    nodes: Count
    dtype: str
    in_place: bool
    bytes: Count
    """As nccl-tests counts them."""
    wire_bytes: Amount
    """Bytes that a link carries in one direction: `bytes` times the factor of bus bandwidth."""
    seconds: Seconds
    low: Seconds
    high: Seconds
    confidence: Share
    skew_s: Seconds
    """The median over calls of the longest rank's time less the shortest's."""
    shortest_rank: Count
    """The rank with the shortest time most often: where all ranks wait for each other, the one that entered last."""
    shortest_share: Share
    """The share of calls in which it had."""
    host_seconds: Seconds | None = None
    """On a GPU, by the host's clock: from an idle device until it is idle again, launch included."""
    readings: tuple[Seconds, ...] = ()
    """The slowest rank's time of each call."""
    wrong_ranks: tuple[Count, ...] = ()
    """Ranks whose result was not what it must be."""
    flags: tuple[Flag, ...] = ()

    def check(self) -> None:
        """ValueError where the time is outside of its interval."""
        if not self.low <= self.seconds <= self.high:
            raise ValueError(f"{self.op} has {self.seconds!r} s in [{self.low!r}, {self.high!r}]")

    @property
    def grade(self) -> Grade:
        """A to F, from the flags."""
        return grade_of(self.flags)

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes over time; None without bytes, and for one rank, which has nobody to send them to."""
        return self.bytes / self.seconds if self.bytes and self.seconds and self.ranks > 1 else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Wire bytes over time; None where nothing crosses a link."""
        return self.wire_bytes / self.seconds if self.wire_bytes and self.seconds else None

    @property
    def curve(self) -> tuple[str, str, str, bool]:
        """What the points of one curve have in common."""
        return self.op, self.group, self.dtype, self.in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimit:
    """The bandwidth of the link that a group communicates over, in one direction."""

    group: str
    bandwidth: Rate
    kind: Literal["catalogue", "measured"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternTiming:
    """One pattern of training as it was run. Times are the medians of the slowest rank's."""

    name: str
    what: str
    """Its model, sizes and collectives in words."""
    step_s: Seconds
    compute_s: Seconds
    """The same step without its communication."""
    communication_s: Seconds
    """The same collectives one after the other, without the computation."""
    predicted_s: Seconds | None
    """The step from `compute_s` and the fitted times of the collectives; None without a fit of one of them."""
    predicted_communication_s: Seconds | None
    difference: Amount | None
    """The largest difference from the result of one rank, over the largest value; None where it could not be run."""
    tolerance: Amount
    steps: Count
    problem: str = ""
    """Why it could not be run here."""

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def hidden_s(self) -> float:
        """Communication behind the computation."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def is_right(self) -> bool:
        """Whether the result is that of one rank."""
        return self.difference is not None and self.difference <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRun(_display.Result):
    """All that was measured in one world."""

    backend: str
    ranks: Count
    nodes: Count
    mesh: tuple[Count, ...]
    environment: Environment
    method: str
    points: tuple[CommPoint, ...]
    fits: tuple[CurveFit, ...]
    links: tuple[LinkLimit, ...]
    patterns: tuple[PatternTiming, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Operations that could not be run, with the reason."""
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __repr__(self) -> str:
        best = max((point.bus_bandwidth or 0.0 for point in self.points), default=0.0)
        rate = f", up to {quantity(best, 'B/s')} of bus bandwidth" if best else ""
        return _display.headline(
            f"Collectives over {self.ranks} ranks with {self.backend}: {len(self.points)} points{rate}"
        )

    def link_of(self, group: str) -> LinkLimit | None:
        """The link that a group communicates over."""
        return next((link for link in self.links if link.group == group), None)

    def share_of_link(self, point: CommPoint) -> float | None:
        """Bus bandwidth over the bandwidth of the link."""
        link, rate = self.link_of(point.group), point.bus_bandwidth
        return rate / link.bandwidth if link is not None and rate is not None else None

    def wrong_points(self) -> tuple[CommPoint, ...]:
        """Points with a wrong result."""
        return tuple(point for point in self.points if point.wrong_ranks)


def fit_points(points: Sequence[CommPoint]) -> tuple[CurveFit, ...]:
    """The regimes of every curve of more than one rank among the points."""
    curves: dict[tuple[str, str, str, bool], list[CommPoint]] = {}
    for point in points:
        if point.bytes and point.seconds and point.ranks > 1:
            curves.setdefault(point.curve, []).append(point)
    return tuple(_fit(curve) for curve in curves.values())


def _fit(curve: Sequence[CommPoint]) -> CurveFit:
    halves = sorted((point.high - point.low) / 2 / point.seconds for point in curve)
    regimes = fit_curve(
        [(float(point.bytes), point.seconds) for point in curve], max(SCATTER, halves[len(halves) // 2])
    )
    errors = [abs(regime_of(regimes, point.bytes).seconds(point.bytes) / point.seconds - 1) for point in curve]
    first = curve[0]
    return CurveFit(
        op=first.op,
        group=first.group,
        ranks=first.ranks,
        nodes=first.nodes,
        concurrent=first.concurrent,
        dtype=first.dtype,
        in_place=first.in_place,
        regimes=regimes,
        mean_error=sum(errors) / len(errors),
        worst_error=max(errors),
        points=len(curve),
        largest_bytes=max(point.bytes for point in curve),
    )


def as_json(run: CommRun) -> dict[str, Any]:
    """The run as plain JSON data, its kind first."""
    return {"nearpeak": KIND, **to_json(run)}


def save(run: CommRun, path: str | Path) -> None:
    """Writes the run to a file that `load_run` reads."""
    write_file(path, json.dumps(as_json(run), indent=1, allow_nan=False) + "\n")


def load_run(path: str | Path) -> CommRun:
    """The run in a file that `nearpeak comm --json FILE` wrote; FileProblem for anything else."""
    data = read_json(path)
    kind = data.get("nearpeak") if isinstance(data, dict) else None
    if kind != KIND:
        raise FileProblem(
            path,
            f'it holds no measured collectives: it says "nearpeak": {brief(kind)}. They are written by '
            "`torchrun --nproc-per-node N -m nearpeak comm --json FILE`",
        )
    if data.get("schema") != SCHEMA:
        raise FileProblem(
            path, f"it has schema {brief(data.get('schema'))} and this version reads {SCHEMA}: measure it again"
        )
    try:
        return from_json(CommRun, {key: value for key, value in data.items() if key != "nearpeak"})
    except ValueError as error:
        raise FileProblem(path, f"it is damaged: {error}") from None
