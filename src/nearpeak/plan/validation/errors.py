"""Measured and predicted values side by side: the records of a validation, and relative errors by group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError
from nearpeak.units import percent

ValidationKind = Literal["training", "inference", "collectives", "pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGroup:
    """Relative errors of a group of rows."""

    name: str
    rows: int
    mean_absolute: float
    median_absolute: float
    mean: float
    """Signed: above 0 where predictions are too large."""
    worst: float
    """The largest error, signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One quantity of one row, measured and predicted."""

    id: str
    what: str
    """The quantity: "step", "memory", "tpot", "ttft", "decode", "throughput", "collective", "speed ratio"."""
    unit: str
    source: str
    about: str
    """Model, GPU and layout."""
    measured: float
    predicted: float
    why: str
    """The largest parts of the prediction, or what is odd about the measurement."""

    @property
    def error(self) -> float:
        """Relative: 0.1 is a prediction 10 % above the measurement."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that cannot be planned, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Result):
    """Errors of one file of measurements."""

    kind: ValidationKind
    path: str
    left_out: bool
    """Whether each source was predicted by constants fitted without it."""
    whole: tuple[ErrorGroup, ...]
    """One for each quantity."""
    by: Mapping[str, tuple[ErrorGroup, ...]]
    """By source, architecture, GPU, scale and other columns of the file."""
    worst: tuple[ComparedRow, ...]
    rows: tuple[ComparedRow, ...]
    skipped: tuple[tuple[str, str], ...]
    """Rows that cannot be planned: id and reason."""
    right: float | None = None
    """Pairs: share with the right winner."""

    def __repr__(self) -> str:
        errors = ", ".join(f"{group.name} {percent(group.mean_absolute)}" for group in self.whole)
        return headline(f"Validation of {self.kind} in {self.path}: {len(self.rows)} rows, mean error {errors}")


def summarize_errors(name: str, errors: Sequence[float]) -> ErrorGroup:
    """Relative errors of one group as one record."""
    sizes = [abs(error) for error in errors]
    return ErrorGroup(
        name=name,
        rows=len(errors),
        mean_absolute=fmean(sizes),
        median_absolute=median(sizes),
        mean=fmean(errors),
        worst=max(errors, key=abs),
    )


def errors_by_key(rows: Sequence[ComparedRow], keys: Sequence[str]) -> tuple[ErrorGroup, ...]:
    """Errors by key and quantity, the largest group first; `keys` has one for each row."""
    several = len({row.what for row in rows}) > 1
    groups: dict[str, list[float]] = {}
    for row, key in zip(rows, keys, strict=True):
        groups.setdefault(f"{key}: {row.what}" if several else key, []).append(row.error)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(summarize_errors(name, errors) for name, errors in ranked)


def gpu_range(gpus: int) -> str:
    """The range of GPU counts that a number falls into."""
    for low, high in ((1, 1), (2, 8), (9, 64), (65, 256), (257, 1024)):
        if gpus <= high:
            return f"{low} GPU" if low == high else f"{low} to {high} GPUs"
    return "more than 1024 GPUs"


def make_validation(
    kind: ValidationKind,
    path: Path,
    leave_out: bool,
    rows: Sequence[ComparedRow],
    keys: Mapping[str, Sequence[str]],
    skipped: Iterable[tuple[str, str]],
    worst: Sequence[ComparedRow],
    right: float | None = None,
    overall: Sequence[str] | None = None,
) -> Validation:
    """Make the record; UsageError where no row could be planned."""
    if not rows:
        reasons = sorted({reason for _, reason in skipped})[:3]
        raise UsageError(f"{path} has no row that can be planned. {' '.join(reasons)}".strip())
    return Validation(
        kind=kind,
        path=str(path),
        left_out=leave_out,
        whole=errors_by_key(rows, overall or ["all"] * len(rows)),
        by={name: errors_by_key(rows, values) for name, values in keys.items()},
        worst=tuple(worst),
        rows=tuple(rows),
        skipped=tuple(skipped),
        right=right,
    )


def worst_rows(rows: Sequence[ComparedRow], count: int) -> list[ComparedRow]:
    """The rows with the largest ratios, so that half counts as much as double."""
    ranked = sorted(rows, key=lambda row: -max(row.predicted / row.measured, row.measured / max(row.predicted, 1e-30)))
    return ranked[:count]
