"""Writes the ranges of training plans: quantiles of measured over predicted step time, sources left out.

    python -m benchmarks.plan.error_bars

To be run after `benchmarks.plan.fit_training`. The runs of a source resemble each other, so every source counts with
the root of its runs. Nothing is tuned: the range has the quantiles between which `NOMINAL` of the runs lie, and
`coverage` says what share of a source's runs the range of the other sources holds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from nearpeak.plan.training.plan import error_group
from nearpeak.plan.validation.training import validate_training

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks" / "measurements" / "measured_training.csv"
FILE = ROOT / "src" / "nearpeak" / "plan" / "training" / "training_error_bars.json"
NOMINAL = 0.8
"""Share of the runs of an unseen source that a range holds."""
Ratio = tuple[str, float]
"""A source, and the logarithm of measured over predicted step time."""


def quantiles(ratios: Sequence[Ratio]) -> tuple[float, float]:
    """The weighted quantiles between which `NOMINAL` of the ratios lie."""
    rows: dict[str, int] = {}
    for source, _ in ratios:
        rows[source] = rows.get(source, 0) + 1
    ranked = sorted((value, rows[source] ** -0.5) for source, value in ratios)
    total = sum(weight for _, weight in ranked)
    ends, passed = [], 0.0
    for share in ((1 - NOMINAL) / 2, (1 + NOMINAL) / 2):
        passed = 0.0
        for value, weight in ranked:
            passed += weight
            if passed >= share * total:
                ends.append(value)
                break
    return ends[0], ends[1]


def coverage(ratios: Sequence[Ratio]) -> float:
    """Share of runs in the range of the other sources; every source counts with the root of its runs."""
    inside = weights = 0.0
    for source in sorted({name for name, _ in ratios}):
        others = [item for item in ratios if item[0] != source]
        own = [value for name, value in ratios if name == source]
        low, high = quantiles(others) if others else (-math.inf, math.inf)
        weight = len(own) ** 0.5
        inside += weight * fmean(low <= value <= high for value in own)
        weights += weight
    return inside / weights


def groups() -> dict[str, dict[str, float]]:
    """The range, the mean error and the number of runs by kind of model."""
    ratios: dict[str, list[Ratio]] = {}
    for row in validate_training(RUNS, left_out=True).rows:
        ratios.setdefault(error_group(row.run.job.model), []).append((row.run.group, -math.log1p(row.error)))
    result = {}
    for name, values in sorted(ratios.items()):
        low, high = quantiles(values)
        result[name] = {
            "error": round(fmean(abs(math.expm1(-value)) for _, value in values), 4),
            "low": round(math.exp(low), 4),
            "high": round(math.exp(high), 4),
            "coverage": round(coverage(values), 4),
            "rows": len(values),
        }
    return result


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    about = (
        "Measured over predicted step times of benchmarks/measurements/measured_training.csv, each source predicted "
    )
    about += "by constants fitted without it; coverage: of sources that had no part in the range. Written by "
    about += "benchmarks.plan.error_bars."
    FILE.write_text(json.dumps({"about": about, "groups": groups()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
