"""`memory_plan` and `training_plan`: everything about a job in one record, for reports and for JSON.

`make_it_fit` lists changes after which a job fits that does not: single changes first, then pairs and triples, ranked
by the step time that follows. `training_error` is how far predictions were off on published runs like the job
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
>>> 0 < plan.error.error < 0.3, plan.error.like
(True, 'dense models on hopper')
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import combinations, product
from typing import Any

from nearpeak.errors import UsageError
from nearpeak.machines.machine import Machine
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import collective_seconds
from nearpeak.plan.models.find import size_in_name
from nearpeak.plan.models.model import Model
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.training.efficiency import fitted_generation, load_efficiency
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import StageMemory, memory, memory_by_stage
from nearpeak.plan.training.time import Planner, TrainingTime

FEWEST_RUNS = 10
"""Runs that a group has at least before its error is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """The mean absolute error, as a share, over some published runs of sources that were left out of the fit."""

    error: float
    rows: int
    like: str
    """Which runs: "dense models on hopper"."""


def error_group(model: Model, machine: Machine | None = None) -> str:
    """The group that a run belongs to: its kind of model, and its generation of GPUs."""
    kind = "models with experts" if model.is_moe else "dense models"
    return kind if machine is None else f"{kind} on {fitted_generation(machine)}"


def training_error(model: Model, machine: Machine) -> ErrorBar:
    """The error on runs of the same kind on the same generation of GPUs, or on any where there are few of those."""
    groups = _error_bars()
    return next(
        found
        for name in (error_group(model, machine), error_group(model), "all runs")
        if (found := groups.get(name)) is not None and found.rows >= FEWEST_RUNS
    )


@cache
def _error_bars() -> dict[str, ErrorBar]:
    text = resources.files("nearpeak.plan.training").joinpath("training_error_bars.json").read_text(encoding="utf-8")
    return {
        name: ErrorBar(error=float(entry["error"]), rows=int(entry["rows"]), like=name)
        for name, entry in json.loads(text)["groups"].items()
    }


MOST_CHANGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One way to make a job fit."""

    what: str
    """The fields that change, as "sharding=zero3, recompute=full"."""
    layout: Layout
    total: float
    """Bytes that the fullest GPU then needs."""
    seconds: float | None
    """Of a step then; None without a cluster."""


def make_it_fit(
    job: Job, capacity: float, planner: Planner | None = None, most: int = MOST_CHANGES
) -> tuple[Change, ...]:
    """Up to `most` changes after which the job needs at most `capacity` bytes; none where nothing tried helps."""
    steps = tuple(_single_changes(job))
    found: list[tuple[dict[str, Any], Change]] = []
    for size in (1, 2, 3):
        if len(found) >= most:
            break
        for parts in combinations(steps, size):
            fields = {name: value for part in parts for name, value in part.items()}
            if len(fields) < sum(map(len, parts)):
                continue  # two values of one field
            if any(known.items() <= fields.items() for known, _ in found):
                continue  # more than is needed
            tried = _changed_job(job, fields)
            if tried is not None and (need := memory(tried).total) <= capacity:
                found.append((fields, _change(tried, fields, need, planner)))
    if not found:
        return _more_gpus(job, capacity)[:most]
    ranked = sorted((change for _, change in found), key=lambda item: (item.seconds or 0.0, item.total))
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
    """The same job on more GPUs, all states sharded."""
    layout = job.layout
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        for tp, recompute in product((layout.tp, 8 * layout.tp), (layout.recompute, ("layer",))):
            gpus = layout.gpus * factor
            ranks = max(1, gpus // (tp * layout.cp * layout.pp))
            batch = max(layout.global_batch, ranks * layout.microbatch)
            fields = {"gpus": gpus, "tp": tp, "sharding": "zero3", "recompute": recompute, "global_batch": batch}
            changed = {name: value for name, value in fields.items() if getattr(layout, name) != value}
            tried = _changed_job(job, changed)
            if tried is not None and (need := memory(tried).total) <= capacity:
                return (_change(tried, changed, need, None),)
    return ()


def _changed_job(job: Job, fields: dict[str, Any]) -> Job | None:
    try:
        return job.with_layout(replace(job.layout, **fields))
    except UsageError:
        return None


def _change(job: Job, fields: dict[str, Any], need: float, planner: Planner | None) -> Change:
    seconds = None
    if planner is not None and job.layout.gpus <= planner.cluster.gpus:
        seconds = planner.time(job).seconds
    return Change(
        what=", ".join(_describe_field(*item) for item in fields.items()),
        layout=job.layout,
        total=need,
        seconds=seconds,
    )


def _describe_field(name: str, value: object) -> str:
    if name == "recompute":
        parts = value if isinstance(value, tuple) else (value,)
        value = "full" if parts == ("layer",) else "+".join(map(str, parts)) or "none"
    return f"{name}={value}"


NEGLIGIBLE_SHARE = 0.005
"""Share of a step below which a part says nothing about where the answer comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a training job on each rank of each pipeline stage, and whether a GPU has so much."""

    job: Job
    parameters: int
    active_parameters: int
    named_parameters: float | None
    """The number of weights that the model's name says."""
    stages: tuple[StageMemory, ...]
    machine: str | None
    capacity: float | None
    """Bytes of one GPU; None where no machine was named."""
    changes: tuple[Change, ...]
    """Where it does not fit: the cheapest changes after which it does."""

    @property
    def fullest(self) -> StageMemory:
        """The stage that needs the most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest stage fits; None where no machine was named."""
        return None if self.capacity is None else self.fullest.total <= self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A training job on a cluster: memory, the time of a step by part, cost, energy, and how far to trust them."""

    job: Job
    cluster: Cluster
    memory: MemoryPlan
    time: TrainingTime
    price: float | None
    """Dollars per GPU and hour."""
    dollars_per_million_tokens: float | None
    joules_per_million_tokens: float | None
    """All GPUs at their board power; hosts, network and cooling come on top. None where the power is not known."""
    error: ErrorBar
    """Of step times of published runs that are like this one."""
    provenance: Provenance
    """The weakest that the answer uses."""
    provenances: tuple[Provenance, ...]

    @property
    def low(self) -> float:
        """Seconds of a step that is faster than predicted by the usual error."""
        return self.time.seconds / (1 + self.error.error)

    @property
    def high(self) -> float:
        """Seconds of a step that is slower than predicted by the usual error."""
        return self.time.seconds * (1 + self.error.error)


def memory_plan(job: Job, cluster: Cluster | None = None, planner: Planner | None = None) -> MemoryPlan:
    """The memory of `job`, and what to change where it does not fit a GPU of `cluster`."""
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
    job: Job, cluster: Cluster, *, price: float | None = None, planner: Planner | None = None
) -> TrainingPlan:
    """One step of `job` on `cluster` with its memory, cost and energy. `price` is dollars per GPU and hour."""
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"price={price!r} must be at least 0 dollars per GPU and hour. Nearest: price=0.")
    planner = planner or Planner(cluster)
    time = planner.time(job)
    gpu_seconds = job.layout.gpus * time.seconds / time.tokens * 1e6
    watts = cluster.machine.power_watts
    provenances = _provenances(job, cluster, time)
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
    )


def _provenances(job: Job, cluster: Cluster, time: TrainingTime) -> tuple[Provenance, ...]:
    """Where the constants come from that the larger parts of a step are made with."""
    kind, parts = fitted_generation(cluster.machine), time.parts
    shares = {name: value / time.seconds for name, value in parts.items()}
    names = [f"products_{kind}", f"attention_{kind}"]
    if job.precision.products == "float8":
        names.append("float8_blackwell" if kind == "blackwell" else "float8_hopper")
    elif job.precision.products == "float4":
        names.append("float4_blackwell")
    if shares["memory-bound"] > NEGLIGIBLE_SHARE:
        names.append("traffic_eager" if job.software == "eager" else "traffic_fused")
    if shares["stragglers"] > NEGLIGIBLE_SHARE:
        names.append("straggle")
    found = list(load_efficiency().of(*names))
    if not _has_fitted_runs(cluster.machine):
        found.append(
            Provenance(kind="transferred", text=f"no run on {cluster.machine.architecture}: utilization of {kind}")
        )
    wires = sum(shares[name] for name in ("tensor", "context", "experts", "pipeline", "data"))
    if job.layout.gpus > 1 and wires > NEGLIGIBLE_SHARE:
        found.append(collective_seconds("all_reduce", 2.0**27, job.layout.gpus, cluster).provenance)
    return tuple(dict.fromkeys(found))


def _has_fitted_runs(machine: Machine) -> bool:
    """Whether published runs on this architecture were fitted."""
    return machine.architecture in ("ampere", "hopper") or machine.architecture.startswith("blackwell")
