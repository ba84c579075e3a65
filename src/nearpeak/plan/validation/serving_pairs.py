"""Pairs of measured serving runs that differ in layout: how often the planner puts the faster one first."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nearpeak.errors import UsageError
from nearpeak.plan.validation.inference import PredictedInference

COLUMNS = ("row_a", "row_b", "option_a", "option_b", "context", "value_a", "value_b")
DIFFERENT = 0.05
"""Runs nearer to each other than this are not ranked: it is what repeats of one run differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPair:
    """Two runs per GPU, measured and predicted; above 1 where the first is faster."""

    context: str
    option_a: str
    option_b: str
    measured: float
    predicted: float

    @property
    def differs(self) -> bool:
        """Whether the two are far enough apart to be ranked."""
        return max(self.measured, 1 / self.measured) - 1 > DIFFERENT

    @property
    def right(self) -> bool:
        """Whether the planner prefers the one that was faster."""
        return (self.predicted > 1) == (self.measured > 1)


def serving_pairs(path: Path, predictions: Iterable[PredictedInference]) -> tuple[ServingPair, ...]:
    """The pairs of `path` whose two rows are among `predictions`, by throughput per GPU."""
    known = {item.measured.id: item for item in predictions if item.quantity == "throughput"}
    found = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"{path}: the column {missing[0]!r} is missing.")
            for row in reader:
                a, b = known.get(row["row_a"]), known.get(row["row_b"])
                if a is None or b is None:
                    continue
                found.append(
                    ServingPair(
                        context=row["context"],
                        option_a=row["option_a"],
                        option_b=row["option_b"],
                        measured=float(row["value_a"]) / float(row["value_b"]),
                        predicted=_per_gpu(a) / _per_gpu(b),
                    )
                )
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}.") from None
    return tuple(found)


def share_right(pairs: Iterable[ServingPair]) -> tuple[float, int]:
    """The share of pairs that differ and are ordered right, and how many differ."""
    ranked = [pair.right for pair in pairs if pair.differs]
    return (sum(ranked) / len(ranked) if ranked else 1.0), len(ranked)


def _per_gpu(item: PredictedInference) -> float:
    return item.predicted / item.measured.deployment.layout.gpus
