"""Pairs of layouts with their winner: whether the planner has the same one, for training and for serving."""

from __future__ import annotations

import csv
from pathlib import Path

from nearpeak.errors import UsageError
from nearpeak.plan.serving.constants import load_serving_constants
from nearpeak.plan.training.compared import Compared, Validation, furthest, validation_of
from nearpeak.plan.validation.inference import predict_quantities
from nearpeak.plan.validation.measured_inference import read_inference
from nearpeak.plan.validation.training import CLOSE, validate_pairs


def validate_pairs_file(path: Path, folder: Path, leave_out: bool, worst: int) -> Validation:
    """Speed ratios of all pairs that differ by more than `CLOSE`; `folder` has the files whose rows they name."""
    rows: list[Compared] = []
    kinds: list[str] = []
    training, inference = folder / "measured_training.csv", folder / "measured_inference.csv"
    if training.exists():
        for pair in validate_pairs(path, training, left_out=leave_out):
            rows.append(_pair(pair.first, pair.second, "training", pair.measured, pair.predicted))
            kinds.append("training")
    if inference.exists():
        found = _served_pairs(path, inference, leave_out)
        rows += found
        kinds += ["inference"] * len(found)
    if not rows:
        raise UsageError(
            f"{path} names rows of measured_training.csv and measured_inference.csv, and {folder} has none that can be "
            "planned. Name their folder with --runs."
        )
    wrong = [row for row in rows if (row.measured > 1) != (row.predicted > 1)]
    return validation_of(
        "pairs", path, leave_out, rows, {"kind": kinds}, (), furthest(wrong, worst), 1 - len(wrong) / len(rows)
    )


def _served_pairs(path: Path, runs: Path, leave_out: bool) -> list[Compared]:
    constants = load_serving_constants()
    known = {row.id: row for row in read_inference(runs)[0]}
    speeds: dict[str, float] = {}
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            first, second = line["row_a"], line["row_b"]
            if (
                line.get("kind") == "training"
                or first not in known
                or second not in known
                or not line["a_over_b_speed"]
            ):
                continue
            measured = float(line["a_over_b_speed"])
            if abs(measured - 1) <= CLOSE:
                continue
            for name in (first, second):
                if name not in speeds:
                    row = known[name]
                    used = constants.leaving_out(row.source) if leave_out else constants
                    try:
                        answer = predict_quantities(row, used)["throughput"]
                    except (KeyError, UsageError):
                        continue
                    speeds[name] = answer[0] / row.deployment.layout.gpus
            if first in speeds and second in speeds:
                found.append(_pair(first, second, "inference", measured, speeds[first] / speeds[second]))
    return found


def _pair(first: str, second: str, kind: str, measured: float, predicted: float) -> Compared:
    return Compared(
        id=f"{first} / {second}",
        what="speed ratio",
        unit="",
        source=kind,
        about=kind,
        measured=measured,
        predicted=predicted,
        why="",
    )
