"""`search_plan`: the best layout of a model on a cluster as a plan, with what the search found besides.

>>> from nearpeak.plan.catalogue import model
>>> from nearpeak.plan.cluster import Cluster
>>> found = search_plan(model("llama-3-8b"), Cluster.of("h100-sxm x 8"), global_batch=64, sequence=8192)
>>> found.plan is not None and found.plan.memory.fits
True
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.plan.answers import TrainingPlan, training_plan
from nearpeak.plan.cluster import Cluster
from nearpeak.plan.job import PRECISIONS, Job, Precision, Software
from nearpeak.plan.models import Model
from nearpeak.plan.search import Found, search

TOKENS = 2**22
"""Of one training step where no batch is given."""


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
    return SearchPlan(model=model, cluster=cluster, sequence=sequence, global_batch=batch, found=found, plan=plan)


def usual_batch(gpus: int, sequence: int) -> int:
    """Sequences of a step of about 4 million tokens that many layouts can share out.

    >>> usual_batch(64, 8192), usual_batch(72, 4096), usual_batch(16384, 8192)
    (512, 1080, 512)
    """
    wanted = max(1, TOKENS // max(1, sequence))
    if gpus > wanted or not gpus & (gpus - 1):
        return 1 << (wanted - 1).bit_length()
    return gpus * -(-wanted // gpus)
