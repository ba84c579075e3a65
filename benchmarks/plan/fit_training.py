"""Fits the constants of training time on published runs, and leaves out whole sources in turn.

    python -m benchmarks.plan.fit_training [--write] [--quick] [--show GROUP]

Needs numpy. Residuals are logarithms of predicted to measured step time. Every constant has a prior (its default in
`plan/efficiency.py`) that holds it where no run says anything, so that few rows cannot move it far. `--write` puts the
result with its provenance into `src/nearpeak/plan/training/training_constants.json`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from nearpeak.plan.cluster.collectives import CollectiveTimes
from nearpeak.plan.training.efficiency import Efficiency
from nearpeak.plan.training.time import Planner
from nearpeak.plan.validation.training import MeasuredTraining, planner_key, read_training

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "measurements" / "measured_training.csv"
TARGET = ROOT / "src" / "nearpeak" / "plan" / "training" / "training_constants.json"
LEFT_OUT = TARGET.parents[1] / "validation" / "training_left_out.json"
FIXED = {"memory", "expert_gemm", "layer_scale", "output_scale", "optimizer_scale"}
"""What is not fitted: measured by copies, hidden by the rest, or from a profile of the user's."""
NAMES = [field.name for field in dataclasses.fields(Efficiency) if field.name not in FIXED]
EXPERT = [index for index, name in enumerate(NAMES) if name.startswith("expert")]
OTHER = [index for index in range(len(NAMES)) if index not in EXPERT]
SPREAD = 0.35
"""Standard deviation of the prior of a constant, in logarithm."""
NOISE, NOISE_EXPERTS = 0.08, 0.15
"""What a row is off by beyond what the constants explain: releases alone move runs with experts by up to 77 %."""
FAR = 2.0
"""Residuals beyond this many times the noise lose their pull (Cauchy's loss)."""
_TIMES: dict[tuple[object, ...], CollectiveTimes] = {}


def predict(rows: list[MeasuredTraining], constants: Efficiency) -> np.ndarray:
    """Step times of all rows."""
    planners: dict[tuple[object, ...], Planner] = {}
    result = []
    for row in rows:
        cluster = row.cluster
        key = planner_key(cluster)
        if key not in planners:
            times = _TIMES.setdefault(key, CollectiveTimes(cluster))
            planners[key] = Planner(cluster, constants, times)
        result.append(planners[key].time(row.job).seconds)
    return np.array(result)


def weights_of(rows: list[MeasuredTraining]) -> np.ndarray:
    """Less weight to each row of a large group of alike rows: a group counts with the root of its size."""
    count = collections.Counter((row.group, row.job.model.name) for row in rows)
    return np.array([count[row.group, row.job.model.name] ** -0.5 for row in rows])


def constants_from(values: np.ndarray) -> Efficiency:
    return Efficiency(**dict(zip(NAMES, np.exp(values).tolist(), strict=True)))


def fit(
    rows: list[MeasuredTraining],
    start: np.ndarray,
    prior: np.ndarray,
    iterations: int,
    jacobian: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """The constants of dense models from dense runs, then those of experts from runs with experts."""
    dense, moe = ([row for row in rows if row.job.model.is_moe is moe] for moe in (False, True))
    values = _fit(dense, start, prior, iterations, OTHER, jacobian)
    return _fit(moe, values, prior, iterations, EXPERT, jacobian)


def slopes(rows: list[MeasuredTraining], values: np.ndarray, columns: list[int]) -> np.ndarray:
    """Relative change of each step time with each constant."""
    base = np.log(predict(rows, constants_from(values)))
    result = np.empty((len(rows), len(columns)))
    for place, column in enumerate(columns):
        moved = values.copy()
        moved[column] += 0.02
        result[:, place] = (np.log(predict(rows, constants_from(moved))) - base) / 0.02
    return result


def _fit(
    rows: list[MeasuredTraining],
    start: np.ndarray,
    prior: np.ndarray,
    iterations: int,
    columns: list[int],
    slopes_by_id: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Gauss-Newton in logarithms of the constants in `columns`, with the prior, and outliers held back.

    With `slopes_by_id` the slopes of each row are those, and not computed anew: a fit near another one is quick.
    """
    measured = np.log([row.seconds for row in rows])
    base = weights_of(rows)
    noise = np.array([NOISE_EXPERTS if row.job.model.is_moe else NOISE for row in rows])
    values = start.copy()
    best, best_cost, damping = values, math.inf, 1e-2
    for _ in range(iterations):
        residual = np.log(predict(rows, constants_from(values))) - measured
        scaled = (residual / noise / FAR) ** 2
        pull = 1 / (1 + scaled)
        cost = float(np.sum(base * FAR**2 / 2 * np.log1p(scaled)))
        cost += float(np.sum((values - prior) ** 2)) / (2 * SPREAD**2)
        if cost < best_cost:
            best, best_cost, damping = values, cost, max(damping / 3, 1e-4)
        else:
            values, damping = (values + best) / 2, damping * 4
            continue
        if slopes_by_id is None:
            jacobian = slopes(rows, values, columns)
        else:
            jacobian = np.array([slopes_by_id[row.id] for row in rows])
        weight = base * pull / noise**2
        normal = jacobian.T @ (jacobian * weight[:, None]) + np.eye(len(columns)) / SPREAD**2
        normal += damping * np.diag(np.diag(normal))
        gradient = jacobian.T @ (weight * residual) + (values - prior)[columns] / SPREAD**2
        step = np.linalg.solve(normal, gradient)
        values = values.copy()
        values[columns] -= np.clip(step, -0.4, 0.4)
    return best


def errors(rows: list[MeasuredTraining], predicted: np.ndarray) -> np.ndarray:
    return predicted / np.array([row.seconds for row in rows]) - 1


def summary(rows: list[MeasuredTraining], error: np.ndarray, title: str) -> None:
    print(f"\n{title}")
    groups: dict[str, list[float]] = collections.defaultdict(list)
    for row, value in zip(rows, error, strict=True):
        kind = "dense" if row.kind in ("dense", "hybrid-ssm") else "moe"
        groups[f"{row.group:12}{row.kind}"].append(value)
        groups[f"~ {kind}"].append(value)
    for name in sorted(groups):
        values = np.array(groups[name])
        print(f"  {name:26}{len(values):5}  mean {values.mean():+7.1%}  abs {np.abs(values).mean():6.1%}  "
              f"median {np.median(np.abs(values)):6.1%}  worst {values[np.argmax(np.abs(values))]:+7.1%}")  # fmt: skip


def left_out(
    rows: list[MeasuredTraining], start: np.ndarray, prior: np.ndarray, iterations: int
) -> tuple[np.ndarray, dict[str, dict[str, float]]]:
    """Each source predicted from a fit on the others, and the constants of these fits."""
    error = np.zeros(len(rows))
    fits = {}
    jacobian: dict[str, np.ndarray] = {}
    for moe, columns in ((False, OTHER), (True, EXPERT)):
        alike = [row for row in rows if row.job.model.is_moe is moe]
        jacobian |= dict(zip([row.id for row in alike], slopes(alike, start, columns), strict=True))
    for source in sorted({row.source for row in rows}):
        kept = [row for row in rows if row.source != source]
        values = fit(kept, start, prior, iterations, jacobian)
        inside = [index for index, row in enumerate(rows) if row.source == source]
        error[inside] = errors([rows[i] for i in inside], predict([rows[i] for i in inside], constants_from(values)))
        fits[source] = {name: float(f"{value:.5g}") for name, value in zip(NAMES, np.exp(values).tolist(), strict=True)}
    return error, fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true", help="no leaving out")
    parser.add_argument("--show", help="print the rows of a group")
    parser.add_argument("--iterations", type=int, default=12)
    arguments = parser.parse_args()
    rows, skipped = read_training(DATA)
    rows = [row for row in rows if row.seconds is not None]
    prior = np.log([getattr(Efficiency(), name) for name in NAMES])
    start = prior.copy()
    if TARGET.exists():
        known = json.loads(TARGET.read_text())["constants"]
        start = np.log([known.get(name, {}).get("value", math.exp(prior[i])) for i, name in enumerate(NAMES)])
    print(f"{len(rows)} rows, {len(skipped)} skipped, {len(NAMES)} constants")
    values = fit(rows, start, prior, arguments.iterations)
    constants = constants_from(values)
    for name, value, before in zip(NAMES, np.exp(values), np.exp(prior), strict=True):
        print(f"  {name:22}{value:12.5g}  prior {before:.5g}")
    predicted = predict(rows, constants)
    error = errors(rows, predicted)
    summary(rows, error, "all rows fitted")
    if arguments.show:
        show(rows, predicted, error, arguments.show, constants)
    mean = float(np.abs(error).mean())
    if not arguments.quick:
        error, fits = left_out(rows, values, prior, 8)
        summary(rows, error, "each source predicted from the others")
        mean = float(np.abs(error).mean())
        if arguments.write:
            data = {
                "about": "Written by benchmarks.plan.fit_training: constants fitted without each source.",
                "sources": fits,
            }
            LEFT_OUT.write_text(json.dumps(data, indent=1) + "\n")
    if arguments.write:
        write(rows, values, prior, mean)


def show(
    rows: list[MeasuredTraining], predicted: np.ndarray, error: np.ndarray, group: str, constants: Efficiency
) -> None:
    for row, value, off in zip(rows, predicted, error, strict=True):
        if row.group != group:
            continue
        layout = row.job.layout
        parts = Planner(row.cluster, constants).time(row.job).parts
        big = "  ".join(f"{name} {100 * part / value:.0f}" for name, part in parts.items() if part > 0.015 * value)
        name, machine, precision = row.job.model.name[:18], row.cluster.machine.id, row.job.precision.name
        degrees = f"tp{layout.tp} pp{layout.pp}x{layout.virtual} cp{layout.cp} ep{layout.ep} {layout.sharding}"
        print(
            f"{row.id:16}{name:19}{machine:9}{layout.gpus:5} {precision:8}s{row.job.sequence} b{layout.global_batch} "
            f"m{layout.microbatch} {degrees} {row.seconds:.3f} {value:.3f} {off:+.1%} | {big}"
        )


def write(rows: list[MeasuredTraining], values: np.ndarray, prior: np.ndarray, mean: float) -> None:
    """The data file: value, kind of provenance, and how many rows of which sources moved it."""
    entries: dict[str, object] = {}
    base = np.log(predict(rows, constants_from(values)))
    for column, name in enumerate(NAMES):
        moved = values.copy()
        moved[column] += 0.05
        change = np.abs(np.log(predict(rows, constants_from(moved))) - base) / 0.05
        felt = [row for row, share in zip(rows, change, strict=True) if share > 0.02]
        sources = sorted({row.group for row in felt})
        kind = "fitted" if len(felt) >= 3 else "assumed"
        text = f"fitted on {len(felt)} runs of {', '.join(sources)}" if felt else "no run depends on it"
        entries[name] = {"value": float(f"{math.exp(values[column]):.5g}"), "kind": kind, "source": text}
    data = {"about": "Written by benchmarks.plan.fit_training.", "error": round(mean, 4), "constants": entries}
    TARGET.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
