"""`training_error`: how far predictions of step times were off, on published runs that are like a job.

`benchmarks/plan_error_bars.py` writes `training_error_bars.json` from a validation that leaves out whole sources.

>>> from nearpeak.machines import catalogue
>>> from nearpeak.plan.models.catalogue import model
>>> found = training_error(model("llama-3-8b"), catalogue.find("h100-sxm"))
>>> found.like, 0 < found.error < 0.3
('dense models on hopper', True)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from nearpeak.machines.model import Machine
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.efficiency import generation

FEWEST = 10
"""Runs that a group has at least before its error is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """The mean absolute error, as a share, over some published runs of sources that were left out of the fit."""

    error: float
    rows: int
    like: str
    """Which runs: "dense models on hopper"."""


def group_of(model: Model, machine: Machine | None = None) -> str:
    """The group that a run belongs to: its kind of model, and its generation of GPUs."""
    kind = "models with experts" if model.is_moe else "dense models"
    return kind if machine is None else f"{kind} on {generation(machine)}"


def training_error(model: Model, machine: Machine) -> ErrorBar:
    """The error on runs of the same kind on the same generation of GPUs, or on any where there are few of those."""
    groups = _groups()
    return next(
        found
        for name in (group_of(model, machine), group_of(model), "all runs")
        if (found := groups.get(name)) is not None and found.rows >= FEWEST
    )


@cache
def _groups() -> dict[str, ErrorBar]:
    text = resources.files("nearpeak.plan.training").joinpath("training_error_bars.json").read_text(encoding="utf-8")
    return {
        name: ErrorBar(error=float(entry["error"]), rows=int(entry["rows"]), like=name)
        for name, entry in json.loads(text)["groups"].items()
    }
