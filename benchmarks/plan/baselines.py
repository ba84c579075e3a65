"""The planner beside a constant utilization, on the same published training runs.

    python -m benchmarks.plan.baselines

Writes the table of docs/plan.md. The baseline divides the FLOPs of a step, recomputation included, by the peak of its
GPUs and the median utilization of the runs of other sources on the same generation of GPUs and in the same precision.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import fmean, median

from nearpeak.plan.training.efficiency import fitted_generation
from nearpeak.plan.training.time import Planner
from nearpeak.plan.validation.training import TrainingRow, dense_or_moe, validate_training

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks" / "measurements" / "measured_training.csv"
PAGE = ROOT / "docs" / "plan.md"
BLOCK = re.compile(r"(?<=<!-- baselines -->\n\n).*?(?=\n<!-- end of baselines -->)", re.DOTALL)


def table() -> str:
    """Mean and median absolute error of both, for dense models and models with experts."""
    rows = validate_training(RUNS, left_out=True).rows
    ideal = [_seconds_at_peak(row) for row in rows]
    kinds = [
        (dense_or_moe(row.run), fitted_generation(row.run.cluster.machine), row.run.job.precision.gemm_dtype)
        for row in rows
    ]
    errors: dict[str, list[tuple[float, float]]] = {}
    for row, at_peak, kind in zip(rows, ideal, kinds, strict=True):
        others = _utilizations(rows, ideal, kinds, kind, row.run.source)
        if others:
            constant = at_peak / median(others) / _measured(row) - 1
            errors.setdefault(kind[0], []).append((abs(row.error), abs(constant)))
    lines = [
        "| runs | rows | mean error: nearpeak | constant utilization | median: nearpeak | constant utilization |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, pairs in sorted(errors.items()):
        ours, theirs = zip(*pairs, strict=True)
        cells = [f"{100 * value:.1f} %" for value in (fmean(ours), fmean(theirs), median(ours), median(theirs))]
        lines.append(f"| {name} | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _utilizations(
    rows: tuple[TrainingRow, ...], ideal: list[float], kinds: list[tuple[str, str, str]], kind: object, source: str
) -> list[float]:
    """Utilizations of the runs of this kind that other sources published."""
    return [
        at_peak / _measured(row)
        for row, at_peak, other in zip(rows, ideal, kinds, strict=True)
        if other == kind and row.run.source != source
    ]


def _measured(row: TrainingRow) -> float:
    assert row.run.seconds is not None
    return row.run.seconds


def _seconds_at_peak(row: TrainingRow) -> float:
    time = Planner(row.run.cluster).time(row.run.job)
    return time.hardware_flops / (time.gpus * time.peak)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    new = table()
    PAGE.write_text(BLOCK.sub(lambda _: new, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(new)


if __name__ == "__main__":
    main()
