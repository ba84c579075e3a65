"""`memory_plan` and `training_plan`: a job with all that is asked of it in one record, for reports and for JSON.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> from nearpeak.plan.training.job import Job, precision_named
>>> from nearpeak.plan.training.layout import Layout
>>> layout = Layout(gpus=8, global_batch=64, sharding="zero3")
>>> job = Job(model=model("llama-3-8b"), layout=layout, sequence=8192, precision=precision_named("bf16"))
>>> found = training_plan(job, Cluster.of("h100-sxm x 8"), price=2.5)
>>> found.memory.fits, found.provenance.kind, found.dollars_per_million_tokens is not None
(True, 'fitted', True)
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.machines.model import Machine
from nearpeak.plan.models.given import named_size
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.network.collectives import collective_seconds
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.training.efficiency import generation, load_efficiency
from nearpeak.plan.training.error_bars import ErrorBar, training_error
from nearpeak.plan.training.fitting import Change, cheapest_changes
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.memory import StageMemory, memory_by_stage
from nearpeak.plan.training.time import Planner, TrainingTime

MOSTLY_IDLE = 0.005
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
        changes = cheapest_changes(job, capacity, planner or Planner(cluster))
    return MemoryPlan(
        job=job,
        parameters=job.model.parameters,
        active_parameters=job.model.active_parameters,
        named_parameters=named_size(job.model.name),
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
    kind, parts = generation(cluster.machine), time.parts
    shares = {name: value / time.seconds for name, value in parts.items()}
    names = [f"products_{kind}", f"attention_{kind}"]
    if job.precision.products == "float8":
        names.append("float8_blackwell" if kind == "blackwell" else "float8_hopper")
    elif job.precision.products == "float4":
        names.append("float4_blackwell")
    if shares["memory-bound"] > MOSTLY_IDLE:
        names.append("traffic_eager" if job.software == "eager" else "traffic_fused")
    if shares["stragglers"] > MOSTLY_IDLE:
        names.append("straggle")
    found = list(load_efficiency().of(*names))
    if not _known(cluster.machine):
        found.append(
            Provenance(kind="transferred", text=f"no run on {cluster.machine.architecture}: utilisation of {kind}")
        )
    wires = sum(shares[name] for name in ("tensor", "context", "experts", "pipeline", "data"))
    if job.layout.gpus > 1 and wires > MOSTLY_IDLE:
        found.append(collective_seconds("all_reduce", 2.0**27, job.layout.gpus, cluster).provenance)
    return tuple(dict.fromkeys(found))


def _known(machine: Machine) -> bool:
    """Whether published runs on this architecture were fitted."""
    return machine.architecture in ("ampere", "hopper") or machine.architecture.startswith("blackwell")
