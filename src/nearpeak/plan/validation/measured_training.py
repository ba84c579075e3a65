"""`read_training`: published training runs, as jobs on clusters with the step time that was measured.

`measured_jobs.py` reads layout, precision and model of a row; here are the cluster and the measured time and memory.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nearpeak.errors import UsageError
from nearpeak.machines.model import Machine
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.training.job import Job
from nearpeak.plan.validation.measured_jobs import job_of, number, whole
from nearpeak.plan.validation.measured_names import catalogue_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One published run."""

    id: str
    group: str
    source: str
    kind: str
    """dense, moe, moe-mla, moe-hybrid or hybrid-ssm."""
    job: Job
    cluster: Cluster
    seconds: float | None
    """Of a step; None where the run failed or was not timed."""
    memory: float | None
    """Peak bytes."""
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that cannot be planned, and why."""

    id: str
    reason: str


def read_training(path: Path) -> tuple[list[Measured], list[Skipped]]:
    """All rows of a file with the columns of `measured_training.csv`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"Cannot read the measurements {str(path)!r}: {error.strerror or error}.") from None
    missing = {"id", "source", "model", "gpu", "gpus", "seq_len", "gbs_seqs"} - set(rows[0] if rows else {})
    if missing:
        raise UsageError(f"The measurements {str(path)!r} have no column {min(missing)!r}.")
    found: list[Measured] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            found.append(_measured(row))
        except (UsageError, ValueError, KeyError) as error:
            skipped.append(Skipped(id=row.get("id") or "?", reason=str(error).split("\n")[0]))
    return found, skipped


def _measured(row: Mapping[str, str]) -> Measured:
    cluster = _cluster(row)
    job = job_of(row, cluster.machine.memory_bytes or 80e9)
    peak = None if "OUTCOME: OOM" in row.get("notes", "") else number(row, "peak_mem_gib")  # a step that did not end
    # nanotron prints bytes / 1024^3 as GB
    unit = 2.0**30 if "GiB" in row.get("mem_kind", "") or "nanotron" in row.get("framework", "") else 1e9
    return Measured(
        id=row["id"],
        group=row.get("group") or row["source"],
        source=row["source"],
        kind=row.get("arch") or ("moe" if job.model.is_moe else "dense"),
        job=job,
        cluster=cluster,
        seconds=_seconds(row, job, cluster.machine),
        memory=None if peak is None else peak * unit,
        notes=row.get("notes", ""),
    )


def _cluster(row: Mapping[str, str]) -> Cluster:
    """The usual cluster of a GPU, with the network, the power limit and the memory bandwidth where a row names them."""
    label, gpus, interconnect = row["gpu"].rstrip("?"), whole(row, "gpus"), row.get("interconnect", "")
    name = catalogue_gpu(label)
    if name is None:
        raise UsageError(f"no GPU {label!r} in the catalogue")
    per_node = 4 if name.startswith("gb") else 8
    count = gpus if gpus <= per_node or gpus % per_node == 0 else -(-gpus // per_node) * per_node
    network = "ethernet-200" if "RoCE" in interconnect and "1600" in interconnect else None
    cluster = Cluster.of(name, gpus=count, network=network)
    said = f"{label} {interconnect} {row.get('notes', '')}"
    watts, memory = re.search(r"(\d{3,4}) ?W\b", said), re.search(r"(\d\.\d+) ?TB/s", said)
    machine = cluster.machine
    if watts:
        machine = replace(machine, power_watts=float(watts.group(1)))
    if memory and machine.theoretical is not None:
        ceilings = replace(machine.theoretical, bandwidth=1e12 * float(memory.group(1)))
        machine = replace(machine, theoretical=ceilings)
    return cluster if machine is cluster.machine else replace(cluster, machine=machine)


def _seconds(row: Mapping[str, str], job: Job, machine: Machine) -> float | None:
    """Seconds of a step: as printed, else from tokens per second, else from FLOP/s by the source's own formula."""
    printed = number(row, "step_time_s")
    if printed is not None:
        return printed
    per_gpu = number(row, "tokens_per_s_per_gpu")
    if per_gpu is not None:
        return job.tokens / (per_gpu * job.layout.gpus)
    rate, model = number(row, "model_tflops_per_gpu"), job.model
    share = number(row, "mfu_pct")
    layers, hidden, sequence = model.layers, model.hidden, job.sequence
    if rate is not None and row.get("hfu_pct"):
        flops = (
            96
            * sequence
            * layers
            * hidden**2
            * (1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden))
        )
    elif rate is not None and not row.get("group", "").startswith("mbridge"):
        flops = (
            72
            * sequence
            * layers
            * hidden**2
            * (1 + sequence / (6 * hidden) + model.vocabulary / (12 * layers * hidden))
        )
    elif rate is None and share is not None:
        # three forward passes, attention not halved, against the 16-bit peak
        weights = 4 * hidden**2 + 3 * hidden * model.intermediate
        flops = 6.0 * sequence * (layers * (weights + 2 * sequence * hidden) + hidden * model.vocabulary)
        assert machine.theoretical is not None
        rate = share / 100 * machine.theoretical.peak("bfloat16") / 1e12
    else:
        return None
    return job.layout.global_batch * flops / (rate * 1e12 * job.layout.gpus)
