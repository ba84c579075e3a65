"""Measured collectives: rows of a CSV file with the columns of `benchmarks/measurements/measured_collectives.csv`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.machines import catalogue
from nearpeak.machines.model import Machine
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.network.systems import load as systems

COLUMNS = ("source", "system", "device", "nccl_version", "op", "num_gpus", "bytes", "time_us")
CONDITIONS = {"l40s": "l40s-server-no-peer"}
"""Systems that were measured under a condition of their own. "l40s": 2 GB/s with 8 GPUs, a fifteenth of what PCIe
gives: peer-to-peer was off."""
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
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                present = ", ".join(reader.fieldnames or ()) or "none"
                raise UsageError(f"{path}: the column {missing[0]!r} is missing. Columns found: {present}.")
            return tuple(_row(path, number, row) for number, row in enumerate(reader, start=2))
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}.") from None


def cluster_of(row: MeasuredCollective) -> Cluster:
    """The cluster that a row was measured on: `system` where the catalogue has one of that name, else the GPU's usual.

    UsageError names the line of a GPU that the catalogue does not have.
    """
    machine = catalogue.by_driver_name(row.device)
    if machine is None:
        raise UsageError(f"line {row.line}: no machine of the catalogue has the device name {row.device!r}.")
    named = CONDITIONS.get(row.system, row.system)
    known: str | Machine = named if named in systems() else machine
    cluster = Cluster.of(known)
    return cluster if row.ranks <= cluster.gpus else Cluster.of(known, gpus=row.ranks)


def _row(path: Path, line: int, row: dict[str, str]) -> MeasuredCollective:
    values: dict[str, float] = {}
    for name in ("num_gpus", "bytes", "time_us"):
        try:
            values[name] = float(row[name])
        except (TypeError, ValueError):
            raise UsageError(f"{path}, line {line}: {name}={row[name]!r} is not a number.") from None
        if values[name] <= 0:
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
