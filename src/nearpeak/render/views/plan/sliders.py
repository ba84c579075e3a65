"""`Sliders`: what the planner computed for all choices of a page, so that a slider looks up and computes nothing.

Of training: memory and the time of a step for each layout near the planned one. Of serving: a decode step for each
batch and context. Where a slider starts, it therefore shows the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nearpeak.errors import UsageError
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.plan import ServingPlan
from nearpeak.plan.serving.step import step_time
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.memory import StageMemory, memory
from nearpeak.plan.training.plan import MemoryPlan, TrainingPlan
from nearpeak.plan.training.time import Planner

STEP_PARTS = ("gemm", "experts", "attention", "elementwise", "communication", "layers", "host")
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers, context, slack")
RECOMPUTES = {"none": (), "parts": ("norm", "feed_activation"), "full": ("layer",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliders:
    """The choices of a page, and the planner's answer to each."""

    kind: Literal["training", "decode"]
    title: str
    note: str
    data: Mapping[str, Any]


def training_sliders(plan: MemoryPlan | TrainingPlan) -> Sliders:
    """Memory, and of a `TrainingPlan` the time of a step, for layouts near the planned one."""
    job = plan.job
    layout, model = job.layout, job.model
    planner = most = None
    if isinstance(plan, TrainingPlan):
        planner = Planner(plan.cluster, None if plan.calibration is None else plan.calibration.efficiency)
        most = plan.cluster.gpus
    recomputes = dict(RECOMPUTES)
    recompute = next((name for name, modules in RECOMPUTES.items() if set(modules) == set(layout.recompute)), None)
    if recompute is None or layout.recompute_share < 1:
        recompute = "as planned"
        recomputes[recompute] = layout.recompute
    choices: dict[str, Sequence[Any]] = {
        "gpus": [gpus for gpus in _near(layout.gpus, 1, 3) if most is None or gpus <= most],
        "tp": _near(layout.tp, 2, 2),
        "pp": [pp for pp in _near(layout.pp, 2, 2) if pp <= model.layers],
        "ep": [ep for ep in _near(layout.ep, 1, 1) if model.experts % ep == 0] if model.is_moe else [1],
        "microbatch": _near(layout.microbatch, 1, 1),
        "sharding": list(dict.fromkeys(("none", "zero1", "zero2", "zero3", layout.sharding))),
        "recompute": list(recomputes),
    }
    problems: dict[str, int] = {}
    cells: list[int | list[float]] = []
    for values in itertools.product(*choices.values()):
        choice = dict(zip(choices, values, strict=True))
        modules = recomputes[choice["recompute"]]
        share = layout.recompute_share if choice["recompute"] == "as planned" else 1.0
        try:
            near = _near_job(job, choice | {"recompute": modules, "recompute_share": share})
        except UsageError as problem:
            cells.append(problems.setdefault(str(problem), len(problems)))
            continue
        times = [] if planner is None else [_short(planner.seconds(near)), near.tokens]
        cells.append([_short(value / 1e9) for value in _memory_parts(memory(near))] + times)
    capacity = plan.memory.capacity if isinstance(plan, TrainingPlan) else plan.capacity
    note = "Each choice shows what the planner computed for it: memory of the fullest pipeline stage"
    note += ", and the time of a step. " if planner else ". "
    note += "A step has as many sequences as planned, or the nearest number that the layout can spread. "
    note += "The tables below stay as planned."
    data = {
        "parts": list(MEMORY_PARTS),
        "cells": cells,
        "problems": list(problems),
        "capacity": capacity,
        "choices": choices,
        "start": {name: getattr(layout, name) for name in choices} | {"recompute": recompute},
    }
    return Sliders(kind="training", title="What if", note=note, data=data)


def _near_job(job: Job, choice: Mapping[str, Any]) -> Job:
    """The planned job with a choice; what it leaves open stays as planned where that is legal."""
    planned = job.layout
    fixed = dict(choice)
    if fixed["sharding"] != planned.sharding:
        fixed["shard_group"] = 0
    if fixed["pp"] != planned.pp:
        fixed |= {"split": (), "virtual": 1, "schedule": "1f1b"}
    degrees = fixed["tp"] * planned.cp * fixed["pp"]
    ranks = max(1, fixed["gpus"] // degrees) * fixed["microbatch"]
    fixed["global_batch"] = max(1, round(planned.global_batch / ranks)) * ranks
    microbatches = fixed["global_batch"] // ranks
    if planned.virtual > 1 and fixed["pp"] == planned.pp and microbatches % planned.pp:
        fixed |= {"virtual": 1, "schedule": "1f1b"}
    return job.with_layout(replace(planned, **fixed))


def _short(value: float) -> float:
    """Five digits of a number, whole where it is."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def _memory_parts(stage: StageMemory) -> tuple[float, ...]:
    """Bytes by the names of `MEMORY_PARTS`; their sum is the total of the stage."""
    parts = (stage.parameters, stage.gradients, stage.optimizer, stage.activation + stage.recomputed, stage.logits)
    return (*parts, stage.total - sum(parts))


def _near(value: int, halvings: int, doublings: int) -> list[int]:
    """`value`, and its halves and doubles."""
    halves = [value >> n for n in range(1, halvings + 1) if value % (1 << n) == 0]
    return sorted({*halves, value, *(value << n for n in range(1, doublings + 1))})


def decode_sliders(plan: ServingPlan) -> Sliders:
    """A decode step of the planner for each batch and context: the page looks up what the planner computed."""
    layout = plan.layout
    deployment = Deployment.of(plan.model, plan.cluster, layout, plan.precision, engine=plan.engine, graphs=plan.graphs)
    batch = _short(max(1.0, plan.replica.running / layout.dp))
    context = plan.load.prompt + plan.load.output // 2
    batches = _including([1 << n for n in range(12)], batch)
    contexts = _including([1 << n for n in range(7, 18)], context)
    steps = [
        [
            step_time(
                deployment,
                sequences=max(1.0, sequences / layout.pp),
                context=tokens,
                in_flight=min(float(layout.pp), sequences),
            )
            for tokens in contexts
        ]
        for sequences in batches
    ]
    data = {
        "parts": list(STEP_PARTS),
        "steps": [[[getattr(step, name) for name in STEP_PARTS] for step in row] for row in steps],
        "limits": [[step.limiter for step in row] for row in steps],
        "cache": [deployment.cache_bytes(tokens) for tokens in contexts],
        "cache_room": plan.memory.cache,
        "choices": {"batch": batches, "context": contexts},
        "start": {"batch": batch, "context": context},
    }
    return Sliders(
        kind="decode",
        title="What if",
        note="The sliders show one decode step of an attention group, as the planner computed it for each batch and "
        "context. The tables below stay as planned.",
        data=data,
    )


def _including(values: Sequence[int], value: float) -> list[float]:
    return sorted({*values, value})
