"""Measured collectives, and predictions for them: error by system, op, group size and message size.

Rows come from a CSV file with the columns of `benchmarks/measurements/measured_collectives.csv`. With `leave_out`, the
rows of a system are predicted by constants that were fitted without any row of that system. A generation of NVLink that
no other system has gets the mean of the other generations. A system over PCIe has no counterpart: its rows are
predicted by constants that were fitted on them, and `held_out` is False.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        if not 0 < values[name] <= 1e18:
            raise UsageError(f"{path}, line {line}: {name}={row[name]!r} must be above 0.")
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
