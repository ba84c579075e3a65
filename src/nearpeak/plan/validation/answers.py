"""`validate`: a file of measurements against the planner, whatever it holds: training, serving, collectives or pairs.

The columns of a file say what it holds. Every source is predicted by constants that were fitted without it, where it
had a part in the fit.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

from nearpeak.errors import UsageError
from nearpeak.plan.training.compared import Compared, Kind, Validation, furthest, scale, validation_of
from nearpeak.plan.validation.collectives import PredictedCollective, predict_collectives, worst_rows
from nearpeak.plan.validation.inference import PredictedInference, predict_inference
from nearpeak.plan.validation.measured_collectives import MeasuredCollective, read_collectives
from nearpeak.plan.validation.measured_inference import read_inference
from nearpeak.plan.validation.measured_training import Measured
from nearpeak.plan.validation.pairs import validate_pairs_file
from nearpeak.plan.validation.training import Row, kind_of, validate_training

COLUMNS: Mapping[Kind, frozenset[str]] = {
    "collectives": frozenset({"op", "num_gpus", "bytes", "time_us"}),
    "pairs": frozenset({"row_a", "row_b", "a_over_b_speed"}),
    "inference": frozenset({"isl", "osl", "engine", "gpu"}),
    "training": frozenset({"seq_len", "gbs_seqs", "gpu", "gpus"}),
}
"""Columns that tell one kind from the others."""


def kind_of_file(path: Path) -> Kind:
    """What a CSV file holds, by its columns; UsageError says which columns are needed."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            columns = set(next(csv.reader(file), ()))
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror or problem}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8.") from None
    for kind, needed in COLUMNS.items():
        if needed <= columns:
            return kind
    nearest = max(COLUMNS, key=lambda kind: len(COLUMNS[kind] & columns))
    missing = ", ".join(sorted(COLUMNS[nearest] - columns))
    raise UsageError(
        f"{path} holds no measurements that are known here. Nearest: {nearest}, which needs the columns {missing} too."
    )


def validate(path: Path, *, leave_out: bool = True, worst: int = 10, runs: Path | None = None) -> Validation:
    """Predictions for all rows of `path`, and how far they are from what was measured.

    `runs` is the folder with the files that pairs take their rows from; the folder of `path` where it is None.
    """
    kind = kind_of_file(path)
    if kind == "training":
        return _training(path, leave_out, worst)
    if kind == "inference":
        return _inference(path, leave_out, worst)
    if kind == "collectives":
        return _collectives(path, leave_out, worst)
    return validate_pairs_file(path, runs or path.parent, leave_out, worst)


def _training(path: Path, leave_out: bool, worst: int) -> Validation:
    found = validate_training(path, left_out=leave_out)
    rows = [_step(row) for row in found.rows]
    runs = [row.run for row in found.rows]
    for peak in found.memory:
        assert peak.run.memory is not None
        rows.append(
            Compared(
                id=peak.run.id,
                what="memory",
                unit="B",
                source=peak.run.source,
                about=_about(peak.run),
                measured=peak.run.memory,
                predicted=peak.bytes,
                why="reserved on the first rank",
            )
        )
        runs.append(peak.run)
    return validation_of(
        "training",
        path,
        leave_out,
        rows,
        {
            "source": [run.source + (", moe" if run.job.model.is_moe else "") for run in runs],
            "architecture": [run.kind for run in runs],
            "GPU": [run.cluster.machine.id for run in runs],
            "scale": [scale(run.job.layout.gpus) for run in runs],
        },
        [(item.id, item.reason) for item in found.skipped],
        furthest(rows, worst),
        overall=["all" if row.what == "memory" else kind_of(run) for row, run in zip(rows, runs, strict=True)],
    )


def _step(row: Row) -> Compared:
    assert row.run.seconds is not None
    return Compared(
        id=row.run.id,
        what="step",
        unit="s",
        source=row.run.source,
        about=_about(row.run),
        measured=row.run.seconds,
        predicted=row.seconds,
        why=row.why,
    )


def _about(run: Measured) -> str:
    job, cluster = run.job, run.cluster
    layout = job.layout
    return f"{job.model.name}, {layout.gpus} {cluster.machine.id}, tp {layout.tp} pp {layout.pp} ep {layout.ep}"


def _inference(path: Path, leave_out: bool, worst: int) -> Validation:
    measured, skipped = read_inference(path)
    predictions, failed = predict_inference(measured, leave_out=leave_out)
    rows = [_served(item) for item in predictions]
    where = [item.measured for item in predictions]
    return validation_of(
        "inference",
        path,
        leave_out,
        rows,
        {
            "source": [row.source for row in where],
            "architecture": ["moe" if row.deployment.model.is_moe else "dense" for row in where],
            "GPU": [row.deployment.cluster.machine.id for row in where],
            "scale": [scale(row.deployment.layout.gpus) for row in where],
            "engine": [row.deployment.engine for row in where],
        },
        [(item.id, item.reason) for item in (*skipped, *failed)],
        furthest(rows, worst),
    )


def _served(item: PredictedInference) -> Compared:
    here = item.measured.deployment
    return Compared(
        id=item.measured.id,
        what=item.quantity,
        unit="tokens/s" if item.quantity == "throughput" else "s",
        source=item.measured.source,
        about=f"{here.model.name}, {here.layout.gpus} {here.cluster.machine.id}, {here.layout}, {here.engine}",
        measured=item.actual,
        predicted=item.predicted,
        why=item.reason,
    )


def _collectives(path: Path, leave_out: bool, worst: int) -> Validation:
    groups: dict[tuple[str, str], list[MeasuredCollective]] = {}
    for row in read_collectives(path):
        groups.setdefault((row.system, row.device), []).append(row)
    predictions: list[PredictedCollective] = []
    skipped: list[tuple[str, str]] = []
    for rows in groups.values():
        try:
            predictions += predict_collectives(rows, leave_out=leave_out)
        except UsageError as problem:  # a GPU that is not in the catalogue takes its rows along, and no others
            skipped += [(f"line {row.line}", str(problem)) for row in rows]
    furthest = [_collective(item, why) for item, why in worst_rows(predictions, worst)] if predictions else []
    keys: dict[str, Callable[[PredictedCollective], str]] = {
        "source": lambda item: item.measured.source.partition("@")[0],
        "architecture": lambda item: item.measured.system,
        "GPU": lambda item: item.measured.device,
        "scale": lambda item: item.group("ranks"),
        "op": lambda item: item.group("op"),
        "size": lambda item: item.group("size"),
    }
    return validation_of(
        "collectives",
        path,
        leave_out,
        [_collective(item, "") for item in predictions],
        {name: [key(item) for item in predictions] for name, key in keys.items()},
        skipped,
        furthest,
    )


def _collective(item: PredictedCollective, why: str) -> Compared:
    row = item.measured
    return Compared(
        id=f"line {row.line}",
        what="collective",
        unit="s",
        source=row.source.partition("@")[0],
        about=f"{row.op}, {row.ranks} {row.system}, {row.bytes:.0f} B",
        measured=row.seconds,
        predicted=item.predicted.seconds,
        why=why,
    )
