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
    from nearpeak.plan.answers import memory_plan, training_plan
    from nearpeak.plan.choice import search_plan
    from nearpeak.plan.cluster import Cluster
    from nearpeak.plan.collectives import collective_seconds
    from nearpeak.plan.given import find_model
    from nearpeak.plan.job import Job, precision_named
    from nearpeak.plan.layout import Layout
    from nearpeak.plan.models import Model
    from nearpeak.plan.serving_answers import Load, serving_plan
    from nearpeak.plan.serving_layout import ServingLayout
    from nearpeak.plan.validation import validate

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
    "Cluster": "cluster",
    "Job": "job",
    "Layout": "layout",
    "Load": "serving_answers",
    "Model": "models",
    "ServingLayout": "serving_layout",
    "collective_seconds": "collectives",
    "find_model": "given",
    "memory_plan": "answers",
    "precision_named": "job",
    "search_plan": "choice",
    "serving_plan": "serving_answers",
    "training_plan": "answers",
    "validate": "validation",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nearpeak.plan' has no attribute {name!r}")
    value = getattr(import_module(f"nearpeak.plan.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
