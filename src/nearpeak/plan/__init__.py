"""Plans for models and clusters that one does not have: memory, speed, layout, serving, collectives. No torch.

The names below are imported on first use.

>>> from nearpeak import plan
>>> layout = plan.Layout(gpus=8, global_batch=64, sharding="zero3")
>>> job = plan.Job(model=plan.find_model("llama-3-8b"), layout=layout, sequence=8192)
>>> plan.training_plan(job, plan.Cluster.of("h100-sxm x 8")).memory.fits
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearpeak.plan.cluster.cluster import Cluster
    from nearpeak.plan.cluster.collectives import collective_seconds
    from nearpeak.plan.models.find import find_model
    from nearpeak.plan.models.model import Model
    from nearpeak.plan.serving.deployment import ServingLayout
    from nearpeak.plan.serving.plan import Load, serving_plan
    from nearpeak.plan.training.job import Job, precision_named
    from nearpeak.plan.training.layout import Layout
    from nearpeak.plan.training.plan import memory_plan, training_plan
    from nearpeak.plan.training.search import search_plan
    from nearpeak.plan.validation.validate import validate

__all__ = [
    "Cluster",
    "Job",
    "Layout",
    "Load",
    "Model",
    "ServingLayout",
    "collective_seconds",
    "find_model",
    "memory_plan",
    "precision_named",
    "search_plan",
    "serving_plan",
    "training_plan",
    "validate",
]

_HOME = {
    "Cluster": "cluster.cluster",
    "Job": "training.job",
    "Layout": "training.layout",
    "Load": "serving.plan",
    "Model": "models.model",
    "ServingLayout": "serving.deployment",
    "collective_seconds": "cluster.collectives",
    "find_model": "models.find",
    "memory_plan": "training.plan",
    "precision_named": "training.job",
    "search_plan": "training.search",
    "serving_plan": "serving.plan",
    "training_plan": "training.plan",
    "validate": "validation.validate",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
