"""`search_plan`: the best layout of a model on a cluster as a plan, with what the search found besides.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> found = search_plan(model("llama-3-8b"), Cluster.of("h100-sxm x 8"), global_batch=64, sequence=8192)
>>> found.plan is not None and found.plan.memory.fits
True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nearpeak.plan.models.model import Model
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.training.answers import TrainingPlan, training_plan
from nearpeak.plan.training.job import PRECISIONS, Job, Precision, Software
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import memory_by_stage
from nearpeak.plan.training.search import Candidate, Found, search

TOKENS = 2**22
"""Of one training step where no batch is given."""


QUICK = 1.0
"""Seconds of a search that is run again under other conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The winner of the same search if one thing were different."""

    what: str
    layout: Layout | None
    """None where nothing fits."""
    tokens_per_second: float
    """Of the winner under this condition."""
    changed: bool
    """Whether another layout wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A model on a cluster without a layout: what the search found, and the winner as a plan."""

    model: Model
    cluster: Cluster
    sequence: int
    global_batch: int
    found: Found
    plan: TrainingPlan | None
    """None where nothing fits."""
    roomy: Candidate | None = None
    """The fastest that leaves room for fragmentation as it was seen in published runs; None where none does."""
    conditions: tuple[Condition, ...] = ()
    """What would change the winner; none where the search takes long."""


def search_plan(
    model: Model,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int | None = None,
    precision: Precision = PRECISIONS["bf16-master"],
    software: Software = "fused",
    price: float | None = None,
) -> SearchPlan:
    """The fastest layout that fits; without `global_batch`, for a step of about 4 million tokens."""
    batch = usual_batch(cluster.gpus, sequence) if global_batch is None else global_batch
    found = search(model, cluster, global_batch=batch, sequence=sequence, precision=precision, software=software)
    plan = None
    if found.best is not None:
        job = Job(model=model, layout=found.best.layout, sequence=sequence, precision=precision, software=software)
        plan = training_plan(job, cluster, price=price)

    def has_room(item: Candidate) -> bool:
        job = Job(model=model, layout=item.layout, sequence=sequence, precision=precision, software=software)
        return max(stage.safe for stage in memory_by_stage(job)) <= (cluster.machine.memory_bytes or 0)

    conditions: tuple[Condition, ...] = ()
    if found.best is not None and found.took < QUICK:
        best = found.best.layout

        def again(what: str, there: Cluster, length: int, sequences: int) -> Condition:
            other = search(
                model, there, global_batch=sequences, sequence=length, precision=precision, software=software
            ).best
            if other is None:
                return Condition(what=what, layout=None, tokens_per_second=0.0, changed=True)
            same = replace(other.layout, global_batch=best.global_batch, recompute=best.recompute) == best
            return Condition(
                what=what,
                layout=other.layout,
                tokens_per_second=sequences * length / other.seconds,
                changed=not same or other.layout.recompute != best.recompute,
            )

        conditions = tuple(again(*one) for one in _others(cluster, sequence, batch))
    return SearchPlan(
        model=model,
        cluster=cluster,
        sequence=sequence,
        global_batch=batch,
        found=found,
        plan=plan,
        roomy=next((item for item in found.front if has_room(item)), None),
        conditions=conditions,
    )


def _others(cluster: Cluster, sequence: int, batch: int) -> Iterator[tuple[str, Cluster, int, int]]:
    """Conditions that a layout depends on, each with the cluster, the sequence and the batch."""
    machine = cluster.machine
    if machine.memory_bytes is not None:
        larger = replace(machine, memory_bytes=int(1.5 * machine.memory_bytes))
        yield "memory x 1.5", replace(cluster, machine=larger), sequence, batch
    if cluster.domains > 1:
        for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
            network = factor * cluster.network_bandwidth
            yield f"network {words}", replace(cluster, network_bandwidth=network), sequence, batch
    yield "sequence x 4", cluster, 4 * sequence, max(1, batch // 4)
    yield "batch / 4", cluster, sequence, max(1, batch // 4)


def usual_batch(gpus: int, sequence: int) -> int:
    """Sequences of a step of about 4 million tokens that many layouts can share out.

    >>> usual_batch(64, 8192), usual_batch(72, 4096), usual_batch(16384, 8192)
    (512, 1080, 512)
    """
    wanted = max(1, TOKENS // max(1, sequence))
    if gpus > wanted or not gpus & (gpus - 1):
        return 1 << (wanted - 1).bit_length()
    return gpus * -(-wanted // gpus)
