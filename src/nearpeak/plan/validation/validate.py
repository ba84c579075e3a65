"""`validate`: a file of measurements against the planner, whatever it holds: training, serving, collectives or pairs.

The columns of a file say what it holds. Every source is predicted by constants that were fitted without it, where it
had a part in the fit. Pairs are two runs that differ in layout: the question is which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nearpeak._files import read_csv
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Machine
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.cluster import load_systems as systems
from nearpeak.plan.cluster.collectives import (
    Collective,
    CollectiveConstants,
    collective_seconds,
    load_collective_constants,
)
from nearpeak.plan.serving.constants import load_serving_constants
from nearpeak.plan.validation.errors import (
    ComparedRow,
    Validation,
    ValidationKind,
    gpu_range,
    make_validation,
    worst_rows,
)
from nearpeak.plan.validation.inference import PredictedInference, predict_inference, predict_quantities, read_inference
from nearpeak.plan.validation.training import (
    TIE,
    MeasuredTraining,
    TrainingRow,
    dense_or_moe,
    read_number,
    validate_pairs,
    validate_training,
)

KIND_COLUMNS: Mapping[ValidationKind, frozenset[str]] = {
    "collectives": frozenset({"op", "num_gpus", "bytes", "time_us"}),
    "pairs": frozenset({"row_a", "row_b", "a_over_b_speed"}),
    "inference": frozenset({"isl", "osl", "engine", "gpu"}),
    "training": frozenset({"seq_len", "gbs_seqs", "gpu", "gpus"}),
}
"""Columns that tell one kind from the others."""


def validate(
    path: Path, *, leave_out: bool = True, worst: int = 10, runs: Path | None = None, simulated: bool = False
) -> Validation:
    """Predictions for all rows of `path`, and how far they are from what was measured.

    `runs` is the folder with the files that pairs take their rows from; the folder of `path` where it is None.
    `simulated`: latencies of servers come from a simulation of the scheduler, and not from formulas.
    """
    kind = kind_of_file(path)
    if kind == "training":
        return _training(path, leave_out, worst)
    if kind == "inference":
        return _inference(path, leave_out, worst, simulated)
    if kind == "collectives":
        return _collectives(path, leave_out, worst)
    return validate_pairs_file(path, runs or path.parent, leave_out, worst)


def kind_of_file(path: Path) -> ValidationKind:
    """What a CSV file holds, by its columns; UsageError says which columns are needed."""
    columns = set(read_csv(path)[0])
    for kind, needed in KIND_COLUMNS.items():
        if needed <= columns:
            return kind
    nearest = max(KIND_COLUMNS, key=lambda kind: len(KIND_COLUMNS[kind] & columns))
    missing = ", ".join(sorted(KIND_COLUMNS[nearest] - columns))
    raise UsageError(
        f"{path} is not a file of measurements. Nearest: {nearest}, which needs the columns {missing} too."
    )


def validate_pairs_file(path: Path, folder: Path, leave_out: bool, worst: int) -> Validation:
    """Speed ratios of all pairs that differ by more than `CLOSE`; `folder` has the files whose rows they name."""
    rows: list[ComparedRow] = []
    kinds: list[str] = []
    training, inference = folder / "measured_training.csv", folder / "measured_inference.csv"
    if training.exists():
        for pair in validate_pairs(path, training, left_out=leave_out):
            rows.append(_compared_pair(pair.first, pair.second, "training", pair.measured, pair.predicted))
            kinds.append("training")
    if inference.exists():
        served = _served_pairs(path, inference, leave_out)
        rows += served
        kinds += ["inference"] * len(served)
    if not rows:
        raise UsageError(
            f"{path} names rows of measured_training.csv and measured_inference.csv, and {folder} has none that can be "
            "planned. Name their folder with --runs."
        )
    wrong = [row for row in rows if (row.measured > 1) != (row.predicted > 1)]
    return make_validation(
        "pairs", path, leave_out, rows, {"kind": kinds}, (), worst_rows(wrong, worst), 1 - len(wrong) / len(rows)
    )


def _served_pairs(path: Path, runs: Path, leave_out: bool) -> list[ComparedRow]:
    constants = load_serving_constants()
    known = {row.id: row for row in read_inference(runs)[0]}
    speeds: dict[str, float] = {}
    pairs = []
    for line in read_csv(path)[1]:
        first, second = line["row_a"], line["row_b"]
        if line.get("kind") == "training" or first not in known or second not in known or not line["a_over_b_speed"]:
            continue
        measured = read_number(line, "a_over_b_speed") or 1.0
        if abs(measured - 1) <= TIE:
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
            pairs.append(_compared_pair(first, second, "inference", measured, speeds[first] / speeds[second]))
    return pairs


def _compared_pair(first: str, second: str, kind: str, measured: float, predicted: float) -> ComparedRow:
    return ComparedRow(
        id=f"{first} / {second}",
        what="speed ratio",
        unit="",
        source=kind,
        about=kind,
        measured=measured,
        predicted=predicted,
        why="",
    )


def _training(path: Path, leave_out: bool, worst: int) -> Validation:
    validation = validate_training(path, left_out=leave_out)
    rows = [_compared_step(row) for row in validation.rows]
    runs = [row.run for row in validation.rows]
    for peak in validation.memory:
        assert peak.run.memory is not None
        rows.append(
            ComparedRow(
                id=peak.run.id,
                what="memory",
                unit="B",
                source=peak.run.source,
                about=_job_summary(peak.run),
                measured=peak.run.memory,
                predicted=peak.bytes,
                why="reserved on the first rank",
            )
        )
        runs.append(peak.run)
    return make_validation(
        "training",
        path,
        leave_out,
        rows,
        {
            "source": [run.source + (", moe" if run.job.model.is_moe else "") for run in runs],
            "architecture": [run.kind for run in runs],
            "GPU": [run.cluster.machine.id for run in runs],
            "scale": [gpu_range(run.job.layout.gpus) for run in runs],
        },
        [(item.id, item.reason) for item in validation.skipped],
        worst_rows(rows, worst),
        overall=["all" if row.what == "memory" else dense_or_moe(run) for row, run in zip(rows, runs, strict=True)],
    )


def _compared_step(row: TrainingRow) -> ComparedRow:
    assert row.run.seconds is not None
    return ComparedRow(
        id=row.run.id,
        what="step",
        unit="s",
        source=row.run.source,
        about=_job_summary(row.run),
        measured=row.run.seconds,
        predicted=row.seconds,
        why=row.why,
    )


def _job_summary(run: MeasuredTraining) -> str:
    job, cluster = run.job, run.cluster
    layout = job.layout
    return f"{job.model.name}, {layout.gpus} {cluster.machine.id}, tp {layout.tp} pp {layout.pp} ep {layout.ep}"


def _inference(path: Path, leave_out: bool, worst: int, simulated: bool) -> Validation:
    measured, skipped = read_inference(path)
    predictions, failed = predict_inference(measured, leave_out=leave_out, simulated=simulated)
    rows = [_compared_serving(item) for item in predictions]
    where = [item.measured for item in predictions]
    return make_validation(
        "inference",
        path,
        leave_out,
        rows,
        {
            "source": [row.source for row in where],
            "architecture": ["moe" if row.deployment.model.is_moe else "dense" for row in where],
            "GPU": [row.deployment.cluster.machine.id for row in where],
            "scale": [gpu_range(row.deployment.layout.gpus) for row in where],
            "engine": [row.deployment.engine for row in where],
        },
        [(item.id, item.reason) for item in (*skipped, *failed)],
        worst_rows(rows, worst),
    )


def _compared_serving(item: PredictedInference) -> ComparedRow:
    deployment = item.measured.deployment
    return ComparedRow(
        id=item.measured.id,
        what=item.quantity,
        unit="tokens/s" if item.quantity == "throughput" else "s",
        source=item.measured.source,
        about=f"{deployment.model.name}, {deployment.layout.gpus} {deployment.cluster.machine.id}, "
        f"{deployment.layout}, {deployment.engine}",
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
    largest = (
        [_compared_collective(item, why) for item, why in worst_collectives(predictions, worst)] if predictions else []
    )
    keys: dict[str, Callable[[PredictedCollective], str]] = {
        "source": lambda item: item.measured.source.partition("@")[0],
        "architecture": lambda item: item.measured.system,
        "GPU": lambda item: item.measured.device,
        "scale": lambda item: f"{item.measured.ranks} GPUs",
        "op": lambda item: item.measured.op,
        "size": lambda item: item.size_range,
    }
    return make_validation(
        "collectives",
        path,
        leave_out,
        [_compared_collective(item, "") for item in predictions],
        {name: [key(item) for item in predictions] for name, key in keys.items()},
        skipped,
        largest,
    )


def _compared_collective(item: PredictedCollective, why: str) -> ComparedRow:
    row = item.measured
    return ComparedRow(
        id=f"line {row.line}",
        what="collective",
        unit="s",
        source=row.source.partition("@")[0],
        about=f"{row.op}, {row.ranks} {row.system}, {row.bytes:.0f} B",
        measured=row.seconds,
        predicted=item.predicted.seconds,
        why=why,
    )


COLLECTIVE_COLUMNS = ("source", "system", "device", "nccl_version", "op", "num_gpus", "bytes", "time_us")
SYSTEM_CONDITIONS = {"l40s": "l40s-server-no-peer"}
"""Systems that were measured under special conditions. "l40s": 2 GB/s with 8 GPUs, a fifteenth of PCIe's bandwidth:
peer-to-peer was off."""
_OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One row: `op` over `ranks` GPUs of one node took `seconds`."""

    source: str
    system: str
    device: str
    """The driver's name of the GPU."""
    nccl_version: str
    op: str
    ranks: int
    bytes: float
    seconds: float
    line: int


def read_collectives(path: Path) -> tuple[MeasuredCollective, ...]:
    """The rows of `path`; UsageError names the line and the column that is wrong."""
    columns, rows = read_csv(path)
    missing = [name for name in COLLECTIVE_COLUMNS if name not in columns]
    if missing:
        raise UsageError(
            f"{path}: the column {missing[0]!r} is missing. Columns found: {', '.join(columns) or 'none'}."
        )
    return tuple(_measured_collective(path, number, row) for number, row in enumerate(rows, start=2))


def cluster_of(row: MeasuredCollective) -> Cluster:
    """The cluster of a row: the system of this name in the catalogue, else the default system of the GPU.

    UsageError names the line of a GPU that is not in the catalogue.
    """
    machine = catalogue.by_driver_name(row.device)
    if machine is None:
        raise UsageError(f"line {row.line}: no machine of the catalogue has the device name {row.device!r}.")
    named = SYSTEM_CONDITIONS.get(row.system, row.system)
    known: str | Machine = named if named in systems() else machine
    cluster = Cluster.of(known)
    return cluster if row.ranks <= cluster.gpus else Cluster.of(known, gpus=row.ranks)


def _measured_collective(path: Path, line: int, row: dict[str, str]) -> MeasuredCollective:
    values: dict[str, float] = {}
    for name in ("num_gpus", "bytes", "time_us"):
        try:
            values[name] = float(row[name])
        except (TypeError, ValueError):
            raise UsageError(f"{path}, line {line}: {name}={row[name]!r} is not a number.") from None
        if not 1e-6 <= values[name] <= 1e18:  # less is no time in seconds
            raise UsageError(f"{path}, line {line}: {name}={row[name]!r} must be from 1e-6 to 1e18.")
    op = _OPS.get(row["op"], row["op"])
    known = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
    if op not in known:
        raise UsageError(f"{path}, line {line}: op={row['op']!r} is not a collective. {did_you_mean(op, known)}")
    return MeasuredCollective(
        source=row["source"],
        system=row["system"],
        device=row["device"],
        nccl_version=row["nccl_version"],
        op=op,
        ranks=int(values["num_gpus"]),
        bytes=values["bytes"],
        seconds=values["time_us"] * 1e-6,
        line=line,
    )


_SIZES = ((2**16, "up to 64 KiB"), (2**20, "up to 1 MiB"), (2**24, "up to 16 MiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCollective:
    """One measured row and its prediction."""

    measured: MeasuredCollective
    predicted: Collective
    held_out: bool
    """Whether the constants were fitted without rows of this system."""

    @property
    def error(self) -> float:
        """Relative: 0.1 is a prediction 10 % above the measurement."""
        return self.predicted.seconds / self.measured.seconds - 1

    @property
    def size_range(self) -> str:
        """The size of the message as a range."""
        return next((name for limit, name in _SIZES if self.measured.bytes <= limit), "above 16 MiB")


def predict_collectives(
    rows: Iterable[MeasuredCollective], *, leave_out: bool = True, constants: CollectiveConstants | None = None
) -> tuple[PredictedCollective, ...]:
    """Each row with its prediction; UsageError names the line of a GPU that is not in the catalogue."""
    whole = constants or load_collective_constants()
    clusters: dict[tuple[str, str, int], Cluster] = {}
    without: dict[str, CollectiveConstants | None] = {}
    predictions = []
    for row in rows:
        key = (row.system, row.device, row.ranks)
        if key not in clusters:
            clusters[key] = cluster_of(row)
        if leave_out and row.system not in without:
            known = any(row.system in link.systems for link in whole.links.values())
            without[row.system] = whole.leaving_out(row.system) if known else whole
        used = without.get(row.system)
        predicted = collective_seconds(row.op, row.bytes, row.ranks, clusters[key], constants=used or whole)
        predictions.append(PredictedCollective(measured=row, predicted=predicted, held_out=used is not None))
    return tuple(predictions)


def worst_collectives(
    predictions: Sequence[PredictedCollective], count: int = 10
) -> tuple[tuple[PredictedCollective, str], ...]:
    """The rows with the largest errors, each with the likeliest reason."""
    ranked = sorted(predictions, key=lambda item: -abs(item.error))[:count]
    curves: dict[tuple[str, str, int], dict[float, float]] = {}
    for item in predictions:
        row = item.measured
        curves.setdefault((row.system, row.op, row.ranks), {})[row.bytes] = row.seconds
    return tuple((item, _reason(item, curves)) for item in ranked)


def _reason(item: PredictedCollective, curves: dict[tuple[str, str, int], dict[float, float]]) -> str:
    row = item.measured
    curve = curves[row.system, row.op, row.ranks]
    smaller = [seconds for size, seconds in curve.items() if size < row.bytes]
    larger = [seconds for size, seconds in sorted(curve.items()) if size > row.bytes]
    if larger and row.seconds > 1.15 * larger[0]:
        return "slower than the next larger message: a disturbed measurement"
    if item.predicted.provenance.kind != "fitted":
        return f"{item.predicted.provenance.kind}: {item.predicted.provenance.text}"
    if smaller and row.seconds > 1.6 * max(smaller) and item.error < 0:
        return "a step in the curve: the protocol changes near this size"
    return f"{item.predicted.algorithm}, {item.predicted.protocol}: the fitted curve differs here"
