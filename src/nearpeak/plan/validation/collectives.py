"""Predictions beside measured collectives: error by system, op, group size and message size, and the worst rows.

With `leave_out`, the rows of a system are predicted by constants that were fitted without any row of that system. A
generation of NVLink that no other system has gets the mean of the other generations. Systems over PCIe have no other to
learn from: their rows are predicted by constants that saw them, and `held_out` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal, get_args

from nearpeak.errors import UsageError
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.network.collectives import Collective, collective_seconds
from nearpeak.plan.network.constants import CollectiveConstants, load_constants
from nearpeak.plan.validation.measured_collectives import MeasuredCollective, cluster_of, read_collectives

Grouping = Literal["source", "system", "device", "op", "ranks", "size", "algorithm", "held out"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
_SIZES = ((2**16, "up to 64 KiB"), (2**20, "up to 1 MiB"), (2**24, "up to 16 MiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCollective:
    """One measured row and what was predicted for it."""

    measured: MeasuredCollective
    predicted: Collective
    held_out: bool
    """Whether no row of this system was used for the constants."""

    @property
    def error(self) -> float:
        """Relative: 0.1 is a prediction 10 % above the measurement."""
        return self.predicted.seconds / self.measured.seconds - 1

    def group(self, by: Grouping) -> str:
        """The name of the group that this row belongs to."""
        if by == "source":
            return self.measured.source
        if by == "system":
            return self.measured.system
        if by == "device":
            return self.measured.device
        if by == "op":
            return self.measured.op
        if by == "ranks":
            return f"{self.measured.ranks} GPUs"
        if by == "algorithm":
            return f"{self.predicted.algorithm} {self.predicted.protocol}"
        if by == "held out":
            return "held out" if self.held_out else "seen"
        return next((name for limit, name in _SIZES if self.measured.bytes <= limit), "above 16 MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Relative errors of one group of rows."""

    name: str
    rows: int
    mean_absolute: float
    median_absolute: float
    mean: float
    """Signed: above 0 where predictions are too slow."""
    worst: float
    """The error with the largest size, signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveValidation:
    """Errors over one file, as tables."""

    whole: ErrorSummary
    by: Mapping[str, tuple[ErrorSummary, ...]]
    """By the names in `GROUPINGS`."""
    worst: tuple[tuple[PredictedCollective, str], ...]
    """Rows with the largest errors, each with the likeliest reason."""


def validate_collectives(path: Path, *, leave_out: bool = True, worst: int = 10) -> CollectiveValidation:
    """Predictions for all rows of the CSV file at `path`, and how far they are from what was measured."""
    predictions = predict_collectives(read_collectives(path), leave_out=leave_out)
    if not predictions:
        raise UsageError(f"{path} has no rows.")
    return CollectiveValidation(
        whole=summary("all", [item.error for item in predictions]),
        by={by: summarise(predictions, by) for by in GROUPINGS},
        worst=worst_rows(predictions, worst),
    )


def predict_collectives(
    rows: Iterable[MeasuredCollective], *, leave_out: bool = True, constants: CollectiveConstants | None = None
) -> tuple[PredictedCollective, ...]:
    """Each row with its prediction; UsageError names the line of a GPU that is not in the catalogue."""
    whole = constants or load_constants()
    clusters: dict[tuple[str, str, int], Cluster] = {}
    without: dict[str, CollectiveConstants | None] = {}
    found = []
    for row in rows:
        key = (row.system, row.device, row.ranks)
        if key not in clusters:
            clusters[key] = cluster_of(row)
        if leave_out and row.system not in without:
            known = any(row.system in link.systems for link in whole.links.values())
            without[row.system] = whole.leaving_out(row.system) if known else whole
        used = without.get(row.system)
        predicted = collective_seconds(row.op, row.bytes, row.ranks, clusters[key], constants=used or whole)
        found.append(PredictedCollective(measured=row, predicted=predicted, held_out=used is not None))
    return tuple(found)


def summarise(predictions: Sequence[PredictedCollective], by: Grouping) -> tuple[ErrorSummary, ...]:
    """Errors by group, in the order in which groups first appear."""
    groups: dict[str, list[float]] = {}
    for item in predictions:
        groups.setdefault(item.group(by), []).append(item.error)
    return tuple(summary(name, errors) for name, errors in groups.items())


def summary(name: str, errors: Sequence[float]) -> ErrorSummary:
    """The errors of one group as one record."""
    sizes = [abs(error) for error in errors]
    return ErrorSummary(
        name=name,
        rows=len(errors),
        mean_absolute=fmean(sizes),
        median_absolute=median(sizes),
        mean=fmean(errors),
        worst=max(errors, key=abs),
    )


def worst_rows(
    predictions: Sequence[PredictedCollective], count: int = 10
) -> tuple[tuple[PredictedCollective, str], ...]:
    """The rows with the largest errors, each with the likeliest reason."""
    ranked = sorted(predictions, key=lambda item: -abs(item.error))[:count]
    curves: dict[tuple[str, str, int], dict[float, float]] = {}
    for item in predictions:
        row = item.measured
        curves.setdefault((row.system, row.op, row.ranks), {})[row.bytes] = row.seconds
    return tuple((item, _reason(item, curves)) for item in ranked)


def _reason(item: PredictedCollective, curves: dict[tuple[str, str, int], dict[float, float]]) -> str:
    row = item.measured
    curve = curves[row.system, row.op, row.ranks]
    smaller = [seconds for size, seconds in curve.items() if size < row.bytes]
    larger = [seconds for size, seconds in sorted(curve.items()) if size > row.bytes]
    if larger and row.seconds > 1.15 * larger[0]:
        return "slower than the next larger message: a disturbed measurement"
    if item.predicted.provenance.kind != "fitted":
        return f"{item.predicted.provenance.kind}: {item.predicted.provenance.text}"
    if smaller and row.seconds > 1.6 * max(smaller) and item.error < 0:
        return "a step in the curve: the protocol changes near this size"
    return f"{item.predicted.algorithm}, {item.predicted.protocol}: the fitted curve differs here"
