"""The planner beside the two usual rules of thumb, on the same published rows.

    python -m benchmarks.plan.baselines

Writes the table of docs/plan.md. Training: the FLOPs of a step, recomputation included, over the peak of its GPUs and
the median utilization of the runs of other sources on the same generation of GPUs and in the same precision.
Collectives: a latency and a bandwidth (alpha-beta) by operation and number of GPUs, fitted on other systems of the same
link; without such a system, on all others, with the bandwidth as a share of the link's.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import fmean, median

from nearpeak.plan.training.efficiency import fitted_generation
from nearpeak.plan.training.time import Planner
from nearpeak.plan.validation.training import TrainingRow, dense_or_moe, validate_training
from nearpeak.plan.validation.validate import PredictedCollective, cluster_of, predict_collectives, read_collectives

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks" / "measurements" / "measured_training.csv"
COLLECTIVES = ROOT / "benchmarks" / "measurements" / "measured_collectives.csv"
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
    errors["collectives"] = _alpha_beta()
    lines = [
        "| rows | number | mean error: nearpeak | rule of thumb | median: nearpeak | rule of thumb |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, pairs in sorted(errors.items()):
        ours, theirs = zip(*pairs, strict=True)
        cells = [f"{100 * value:.1f} %" for value in (fmean(ours), fmean(theirs), median(ours), median(theirs))]
        lines.append(f"| {name} | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _alpha_beta() -> list[tuple[float, float]]:
    """Errors of the planner and of alpha-beta for each measured collective, the row's system left out of both."""
    rows = predict_collectives(read_collectives(COLLECTIVES), leave_out=True)
    clusters = {row.measured.system: cluster_of(row.measured) for row in rows}
    groups: dict[tuple[str, int], list[PredictedCollective]] = {}
    for row in rows:
        groups.setdefault((row.measured.op, row.measured.ranks), []).append(row)
    errors = []
    for group in groups.values():
        for system in {row.measured.system for row in group}:
            own = [row for row in group if row.measured.system == system]
            others = [row for row in group if row.measured.system != system]
            link = clusters[system].link_bandwidth
            alike = [row for row in others if clusters[row.measured.system].link_bandwidth == link] or others
            if not alike or not link:
                continue
            # seconds over the time of the wire, so that systems with other links share one bandwidth
            points = [
                (row.measured.bytes / (clusters[row.measured.system].link_bandwidth or link), row.measured.seconds)
                for row in alike
            ]
            alpha, share = _relative_least_squares(points)
            for row in own:
                constant = (alpha + share * row.measured.bytes / link) / row.measured.seconds - 1
                errors.append((abs(row.error), abs(constant)))
    return errors


def _relative_least_squares(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The line a + b x with the least squares of relative errors."""
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    across = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True))
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = across / spread if spread else 0.0
    return y_mean - slope * x_mean, slope


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
