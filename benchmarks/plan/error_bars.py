"""Writes the error bars of training plans: the mean error by kind of model and generation of GPUs, sources left out.

    python -m benchmarks.plan.error_bars

To be run after `benchmarks.plan.fit_training`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from nearpeak.plan.training.plan import error_group
from nearpeak.plan.validation.training import validate_training

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks" / "measurements" / "measured_training.csv"
FILE = ROOT / "src" / "nearpeak" / "plan" / "training" / "training_error_bars.json"


def groups() -> dict[str, dict[str, float]]:
    """Error and number of runs by group."""
    errors_by_group: dict[str, list[float]] = {}
    for row in validate_training(RUNS, left_out=True).rows:
        model, machine = row.run.job.model, row.run.cluster.machine
        for name in ("all runs", error_group(model), error_group(model, machine)):
            errors_by_group.setdefault(name, []).append(abs(row.error))
    return {
        name: {"error": round(fmean(errors), 4), "rows": len(errors)}
        for name, errors in sorted(errors_by_group.items())
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    about = "Mean absolute error of step times on benchmarks/measurements/measured_training.csv, each source predicted "
    about += "by constants fitted without it. Written by benchmarks.plan.error_bars."
    FILE.write_text(json.dumps({"about": about, "groups": groups()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
