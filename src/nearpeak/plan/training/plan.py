"""`memory_plan` and `training_plan`: everything about a job in one record, for reports and for JSON.

`make_it_fit` lists changes after which a job fits that does not: single changes first, then pairs and triples, ranked
by the step time that follows. `training_error` is the range in which eight of ten published runs of unseen sources lie
(`training_error_bars.json`, written by `benchmarks.plan.error_bars`).

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> from nearpeak.plan.training.job import Job, precision_named
>>> from nearpeak.plan.training.layout import Layout
>>> layout = Layout(gpus=8, global_batch=64, sharding="zero3")
>>> job = Job(model=get_model("llama-3-8b"), layout=layout, sequence=8192, precision=precision_named("bf16"))
>>> plan = training_plan(job, Cluster.of("h100-sxm x 8"), price=2.5)
>>> plan.memory.fits, plan.provenance.kind, plan.dollars_per_million_tokens is not None
(True, 'fitted', True)
>>> plan.low < plan.time.seconds < plan.high, plan.error.like
(True, 'dense models')
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import combinations, product
from typing import Any

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError
from nearpeak.machines.machine import Machine
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import collective_seconds
from nearpeak.plan.models.find import size_in_name
from nearpeak.plan.models.model import Model
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.training.calibration import Calibration
from nearpeak.plan.training.efficiency import fitted_generation, load_efficiency
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import StageMemory, memory, memory_by_stage
from nearpeak.plan.training.time import Planner, TrainingTime
from nearpeak.units import quantity, seconds_between

NEGLIGIBLE_SHARE = 0.005
"""Share of a step below which the provenance of a part is left out."""
MOST_CHANGES = 4
"""Changes that `make_it_fit` lists."""
UNSEEN = 1.5
"""The range on an architecture without runs, over that with runs, in logarithm. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(Result):
    """Memory of a training job on each rank of each pipeline stage, and whether it fits a GPU."""

    job: Job
    parameters: int
    active_parameters: int
    named_parameters: float | None
    """The number of weights in the model's name, 8e9 for "llama-3-8b"."""
    stages: tuple[StageMemory, ...]
    machine: str | None
    capacity: float | None
    """Bytes of one GPU; None without a cluster."""
    changes: tuple[Change, ...]
    """Changes after which it fits, the fastest first; empty where it fits."""

    def __repr__(self) -> str:
        room = "" if self.capacity is None else f" of {quantity(self.capacity, 'B')}"
        fits = "" if self.fits is None else ", fits" if self.fits else ", does not fit"
        need = f"{quantity(self.fullest.total, 'B')}{room} on the fullest of {self.job.layout.gpus} GPUs{fits}"
        return headline(f"MemoryPlan of {self.job.model.name}: {need}")

    @property
    def fullest(self) -> StageMemory:
        """The stage that needs the most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest stage fits; None without a cluster."""
        return None if self.capacity is None else self.fullest.total <= self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Result):
    """A training job on a cluster: memory, the time of a step by part, cost, energy, and the error bar."""

    job: Job
    cluster: Cluster
    memory: MemoryPlan
    time: TrainingTime
    price: float | None
    """Dollars per GPU and hour."""
    dollars_per_million_tokens: float | None
    joules_per_million_tokens: float | None
    """All GPUs at their board power, without hosts, network and cooling; None where the power is not known."""
    error: ErrorBar
    """Error of predicted step times on published runs like this one."""
    provenance: Provenance
    """The weakest of `provenances`."""
    provenances: tuple[Provenance, ...]
    calibration: Calibration | None = None
    """The measured step that set the pace, where there was one."""

    def __repr__(self) -> str:
        where = f"{self.cluster.gpus} x {self.cluster.machine.id}"
        interval = seconds_between(self.time.seconds, self.low, self.high)
        fits = "" if self.memory.fits else ", does not fit"
        return headline(f"TrainingPlan of {self.job.model.name} on {where}: {interval} a step{fits}")

    @property
    def low(self) -> float:
        """Seconds of a step at the low end of the range of `error`."""
        return self.time.seconds * self.error.low

    @property
    def high(self) -> float:
        """Seconds of a step at the high end of the range of `error`."""
        return self.time.seconds * self.error.high


def memory_plan(job: Job, cluster: Cluster | None = None, planner: Planner | None = None) -> MemoryPlan:
    """The memory of `job`, and the changes to make where it does not fit a GPU of `cluster`."""
    stages = tuple(memory_by_stage(job))
    capacity = cluster.machine.memory_bytes if cluster is not None else None
    need = max(stage.total for stage in stages)
    changes: tuple[Change, ...] = ()
    if cluster is not None and capacity is not None and need > capacity:
        changes = make_it_fit(job, capacity, planner or Planner(cluster))
    return MemoryPlan(
        job=job,
        parameters=job.model.parameters,
        active_parameters=job.model.active_parameters,
        named_parameters=size_in_name(job.model.name),
        stages=stages,
        machine=None if cluster is None else cluster.machine.name,
        capacity=capacity,
        changes=changes,
    )


def training_plan(
    job: Job,
    cluster: Cluster,
    *,
    price: float | None = None,
    planner: Planner | None = None,
    calibration: Calibration | None = None,
) -> TrainingPlan:
    """One step of `job` on `cluster` with its memory, cost and energy. `price` is dollars per GPU and hour.

    `calibration` has the constants of a measured step of a few layers (`calibrate_plan`).
    """
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"price={price!r} must be at least 0 dollars per GPU and hour. Nearest: price=0.")
    planner = planner or Planner(cluster, None if calibration is None else calibration.efficiency)
    time = planner.time(job)
    gpu_seconds = job.layout.gpus * time.seconds / time.tokens * 1e6
    watts = cluster.machine.power_watts
    provenances = _provenances(job, cluster, time, calibration)
    return TrainingPlan(
        job=job,
        cluster=cluster,
        memory=memory_plan(job, cluster, planner),
        time=time,
        price=price,
        dollars_per_million_tokens=None if price is None else price * gpu_seconds / 3600,
        joules_per_million_tokens=None if watts is None else watts * gpu_seconds,
        error=training_error(job.model, cluster.machine),
        provenance=weakest(*provenances),
        provenances=provenances,
        calibration=calibration,
    )


def _provenances(
    job: Job, cluster: Cluster, time: TrainingTime, calibration: Calibration | None
) -> tuple[Provenance, ...]:
    """Provenance of the constants behind the larger parts of a step."""
    kind, parts = fitted_generation(cluster.machine), time.parts
    shares = {name: value / time.seconds for name, value in parts.items()}
    names = [f"gemm_{kind}", f"attention_{kind}"]
    if job.precision.gemm_dtype == "float8":
        names.append("float8_blackwell" if kind == "blackwell" else "float8_hopper")
    elif job.precision.gemm_dtype == "float4":
        names.append("float4_blackwell")
    if shares["memory-bound"] > NEGLIGIBLE_SHARE:
        names.append("traffic_eager" if job.software == "eager" else "traffic_fused")
    if shares["stragglers"] > NEGLIGIBLE_SHARE:
        names.append("straggle")
    provenances = list(load_efficiency().of(*names))
    if calibration is not None:
        beyond = ("straggle",) if "straggle" in names else ()  # one GPU does not show it
        provenances = [Provenance(kind="measured", text=calibration.text), *load_efficiency().of(*beyond)]
    elif not _has_fitted_runs(cluster.machine):
        provenances.append(
            Provenance(kind="transferred", text=f"no run on {cluster.machine.architecture}: utilization of {kind}")
        )
    communication = sum(shares[name] for name in ("tensor", "context", "experts", "pipeline", "data"))
    if job.layout.gpus > 1 and communication > NEGLIGIBLE_SHARE:
        provenances.append(collective_seconds("all_reduce", 2.0**27, job.layout.gpus, cluster).provenance)
    return tuple(dict.fromkeys(provenances))


def _has_fitted_runs(machine: Machine) -> bool:
    """Whether the constants of this architecture were fitted on runs on it."""
    return machine.architecture in ("ampere", "hopper") or machine.architecture.startswith("blackwell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Fields of a layout to change, so that a job fits."""

    what: str
    """The fields as text: "sharding=zero3, recompute=full"."""
    layout: Layout
    total: float
    """Bytes that the fullest GPU needs after the change."""
    seconds: float | None
    """Seconds of a step after the change; None without a cluster."""


def make_it_fit(
    job: Job, capacity: float, planner: Planner | None = None, most: int = MOST_CHANGES
) -> tuple[Change, ...]:
    """Up to `most` changes after which the job needs at most `capacity` bytes; empty where none helps."""
    singles = tuple(_single_changes(job))
    if planner is not None and planner.cluster.machine.pcie is None:
        singles = tuple(single for single in singles if "offload" not in single)
    changes: list[tuple[dict[str, Any], Change]] = []
    for size in (1, 2, 3):
        if len(changes) >= most:
            break
        for combination in combinations(singles, size):
            fields = {name: value for single in combination for name, value in single.items()}
            if len(fields) < sum(map(len, combination)):
                continue  # two values of one field
            if any(smaller.items() <= fields.items() for smaller, _ in changes):
                continue  # a part of this combination is enough
            changed = _changed_job(job, fields)
            if changed is not None and (total := memory(changed).total) <= capacity:
                changes.append((fields, _change(changed, fields, total, planner)))
    if not changes:
        return _more_gpus(job, capacity)[:most]
    ranked = sorted((change for _, change in changes), key=lambda change: (change.seconds or 0.0, change.total))
    return tuple(ranked[:most])


def _single_changes(job: Job) -> Iterator[dict[str, Any]]:
    layout = job.layout
    order = ("none", "zero1", "zero2", "zero3")
    if layout.sharding in order and layout.state_ranks > 1:
        yield from ({"sharding": name} for name in order[order.index(layout.sharding) + 1 :])
    if not layout.recomputes("layer"):
        yield {"recompute": ("layer",)}
        if not layout.recompute:
            yield {"recompute": ("norm", "feed_activation")}
    if layout.microbatch > 1:
        yield {"microbatch": 1}
        if layout.microbatch % 2 == 0 and layout.microbatch > 2:
            yield {"microbatch": layout.microbatch // 2}
    for field in ("tp", "pp", "cp", *(("ep",) if job.model.is_moe else ())):
        value = getattr(layout, field)
        yield from ({field: value * factor} for factor in (2, 4, 8) if value * factor <= min(layout.gpus, 64))
    if layout.offload == "none":
        yield {"offload": "optimizer"}


def _more_gpus(job: Job, capacity: float) -> tuple[Change, ...]:
    """The same job on the fewest GPUs of 2, 4, 8, ... times as many on which it fits, all states sharded."""
    layout = job.layout
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        for tp, recompute in product((layout.tp, 8 * layout.tp), (layout.recompute, ("layer",))):
            gpus = layout.gpus * factor
            ranks = max(1, gpus // (tp * layout.cp * layout.pp))
            batch = max(layout.global_batch, ranks * layout.microbatch)
            fields: dict[str, Any] = {
                "gpus": gpus,
                "tp": tp,
                "sharding": "zero3",
                "recompute": recompute,
                "global_batch": batch,
            }
            fields = {name: value for name, value in fields.items() if getattr(layout, name) != value}
            changed = _changed_job(job, fields)
            if changed is not None and (total := memory(changed).total) <= capacity:
                return (_change(changed, fields, total, None),)
    return ()


def _changed_job(job: Job, fields: dict[str, Any]) -> Job | None:
    try:
        return job.with_layout(replace(job.layout, **fields))
    except UsageError:
        return None


def _change(job: Job, fields: dict[str, Any], total: float, planner: Planner | None) -> Change:
    seconds = None
    if planner is not None and job.layout.gpus <= planner.cluster.gpus:
        seconds = planner.time(job).seconds
    return Change(
        what=", ".join(_describe_field(*item) for item in fields.items()),
        layout=job.layout,
        total=total,
        seconds=seconds,
    )


def _describe_field(name: str, value: object) -> str:
    if name == "recompute":
        parts = value if isinstance(value, tuple) else (value,)
        value = "full" if parts == ("layer",) else "+".join(map(str, parts)) or "none"
    return f"{name}={value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """Measured over predicted step times of published runs, of sources that were left out of the fit."""

    error: float
    """Mean relative error."""
    low: float
    """Measured over predicted: eight of ten runs of a source that was left out lie between `low` and `high`."""
    high: float
    rows: int
    like: str
    """The runs: "dense models"."""
    seen: bool = True
    """Whether there are runs on this architecture of GPUs; else the range is wider, by `UNSEEN` in logarithm."""


def training_error(model: Model, machine: Machine) -> ErrorBar:
    """The range of runs of this kind of model; wider where no run is on this architecture."""
    bar = _error_bars()[error_group(model)]
    if _has_fitted_runs(machine):
        return bar
    middle, half = math.sqrt(bar.low * bar.high), UNSEEN * math.log(bar.high / bar.low) / 2
    return replace(bar, low=middle * math.exp(-half), high=middle * math.exp(half), seen=False)


def error_group(model: Model) -> str:
    """The group of a run: its kind of model. Sources are too few to split it further."""
    return "models with experts" if model.is_moe else "dense models"


@cache
def _error_bars() -> dict[str, ErrorBar]:
    text = resources.files("nearpeak.plan.training").joinpath("training_error_bars.json").read_text(encoding="utf-8")
    return {
        name: ErrorBar(
            error=float(entry["error"]),
            low=float(entry["low"]),
            high=float(entry["high"]),
            rows=int(entry["rows"]),
            like=name,
        )
        for name, entry in json.loads(text)["groups"].items()
    }
