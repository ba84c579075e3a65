"""`validate_training`: published training runs against the planner, by source, architecture, GPU and scale.

Step time is compared, never a printed utilisation: sources count FLOPs in different ways. Each source can be predicted
with constants that were fitted on the other sources: `benchmarks/fit_training.py` writes these fits into
`training_left_out.json`, so that validating takes a second.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean, median

from nearpeak.errors import UsageError
from nearpeak.plan.training.efficiency import Efficiency, load_efficiency
from nearpeak.plan.training.memory import memory_by_stage
from nearpeak.plan.training.time import Planner
from nearpeak.plan.validation.measured_training import Measured, Skipped, read_training

CLOSE = 0.05
"""Pairs of layouts whose speeds differ by less are not asked which is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run: measured and predicted."""

    run: Measured
    seconds: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        """Predicted to measured step time, less 1."""
        assert self.run.seconds is not None
        return self.seconds / self.run.seconds - 1

    @property
    def why(self) -> str:
        """The largest parts of the prediction: where to look for what is wrong."""
        largest = sorted(self.parts.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} {value / self.seconds:.0%}" for name, value in largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One run's peak memory: measured and predicted, as the source says it: what torch reserves on the first rank."""

    run: Measured
    bytes: float

    @property
    def error(self) -> float:
        """Predicted to measured peak, less 1."""
        assert self.run.memory is not None
        return self.bytes / self.run.memory - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs that differ in layout: speed of the first to the second, measured and predicted."""

    first: str
    second: str
    measured: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the prediction has the same winner."""
        return (self.measured > 1) == (self.predicted > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Errors of some rows."""

    name: str
    rows: int
    mean: float
    absolute: float
    median: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingValidation:
    """All runs of a file."""

    rows: tuple[Row, ...]
    memory: tuple[MemoryRow, ...]
    skipped: tuple[Skipped, ...]
    left_out: bool
    """Whether each source was predicted from a fit without it."""

    def by(self, key: Callable[[Row], str]) -> tuple[Group, ...]:
        """Errors by whatever `key` says of a row, largest error first."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            found.setdefault(key(row), []).append(row.error)
        return tuple(sorted((_group(name, errors) for name, errors in found.items()), key=lambda item: -item.absolute))

    @property
    def by_source(self) -> tuple[Group, ...]:
        """Dense runs and runs with experts apart."""
        return self.by(lambda row: f"{row.run.source}, {kind_of(row.run)}")

    @property
    def by_gpu(self) -> tuple[Group, ...]:
        """By machine."""
        return self.by(lambda row: row.run.cluster.machine.id)

    @property
    def by_scale(self) -> tuple[Group, ...]:
        """By the number of GPUs."""
        return self.by(lambda row: _scale(row.run.job.layout.gpus))

    @property
    def by_architecture(self) -> tuple[Group, ...]:
        """By kind of model."""
        return self.by(lambda row: row.run.kind)

    def overall(self, kind: str) -> Group:
        """All runs of a kind, "dense" or "moe"."""
        errors = [row.error for row in self.rows if kind_of(row.run) == kind]
        if not errors:
            raise UsageError(f"The measurements have no run of kind {kind!r} that can be planned.")
        return _group(kind, errors)

    def worst(self, count: int = 10) -> tuple[Row, ...]:
        """The rows that are furthest off."""
        return tuple(sorted(self.rows, key=lambda row: -abs(row.error))[:count])


def kind_of(run: Measured) -> str:
    """ "moe" for a model with experts, else "dense"."""
    return "moe" if run.job.model.is_moe else "dense"


def validate_training(path: Path, *, left_out: bool = True) -> TrainingValidation:
    """Every run of `path` that can be planned; with `left_out` each by constants fitted without its source."""
    runs, skipped = read_training(path)
    planners: dict[tuple[object, ...], Planner] = {}
    rows = []
    for run in runs:
        if run.seconds is None:
            continue
        found = _planner(run, planners, left_out).time(run.job)
        rows.append(Row(run=run, seconds=found.seconds, parts=found.parts))
    peaks = [MemoryRow(run=run, bytes=memory_by_stage(run.job)[0].reserved) for run in runs if run.memory is not None]
    return TrainingValidation(rows=tuple(rows), memory=tuple(peaks), skipped=tuple(skipped), left_out=left_out)


def validate_pairs(path: Path, runs: Path, *, left_out: bool = True) -> tuple[Pair, ...]:
    """The pairs of training layouts in `path` that differ by more than `CLOSE`; `runs` has the rows they name."""
    known = {row.run.id: row for row in validate_training(runs, left_out=left_out).rows}
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            first, second = known.get(line["row_a"]), known.get(line["row_b"])
            if line["kind"] != "training" or first is None or second is None or not line["a_over_b_speed"]:
                continue
            measured = float(line["a_over_b_speed"])
            if abs(measured - 1) <= CLOSE:
                continue
            speeds = [row.run.job.tokens / row.seconds / row.run.job.layout.gpus for row in (first, second)]
            found.append(
                Pair(first=first.run.id, second=second.run.id, measured=measured, predicted=speeds[0] / speeds[1])
            )
    return tuple(found)


@cache
def constants_without(source: str) -> Efficiency:
    """Constants that were fitted without this source; those of the package where it had no part in the fit."""
    text = resources.files("nearpeak.plan.validation").joinpath("training_left_out.json").read_text(encoding="utf-8")
    known = {field.name for field in fields(Efficiency)}
    values = json.loads(text)["sources"].get(source)
    if values is None:
        return load_efficiency().values
    return Efficiency(**{name: float(value) for name, value in values.items() if name in known})


def _planner(run: Measured, planners: dict[tuple[object, ...], Planner], left_out: bool) -> Planner:
    cluster = run.cluster
    key = (cluster.machine.id, cluster.gpus, cluster.network_name, run.source if left_out else "")
    if key not in planners:
        planners[key] = Planner(cluster, constants_without(run.source) if left_out else None)
    return planners[key]


def _group(name: str, errors: Iterable[float]) -> Group:
    values = list(errors)
    absolute = [abs(value) for value in values]
    return Group(
        name=name,
        rows=len(values),
        mean=fmean(values),
        absolute=fmean(absolute),
        median=median(absolute),
        worst=max(values, key=abs),
    )


def _scale(gpus: int) -> str:
    for limit in (8, 64, 256, 1024):
        if gpus <= limit:
            return f"up to {limit} GPUs"
    return "more than 1024 GPUs"
