"""`cheapest_changes`: what would make a training job fit that does not, the quickest first.

Every change on its own, then pairs of them, until some fit. A change is legal, needs no other number of GPUs unless
nothing else helps, and is ranked by the step time that follows, times the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from nearpeak.errors import UsageError
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import memory
from nearpeak.plan.training.time import Planner

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


def cheapest_changes(
    job: Job, capacity: float, planner: Planner | None = None, most: int = MOST_CHANGES
) -> tuple[Change, ...]:
    """Up to `most` changes after which the job needs at most `capacity` bytes; none where nothing tried helps."""
    steps = tuple(_steps(job))
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
            tried = _tried(job, fields)
            if tried is not None and (need := memory(tried).total) <= capacity:
                found.append((fields, _change(tried, fields, need, planner)))
    if not found:
        return _more_gpus(job, capacity)[:most]
    ranked = sorted((change for _, change in found), key=lambda item: (item.seconds or 0.0, item.total))
    return tuple(ranked[:most])


def _steps(job: Job) -> Iterator[dict[str, Any]]:
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
            tried = _tried(job, changed)
            if tried is not None and (need := memory(tried).total) <= capacity:
                return (_change(tried, changed, need, None),)
    return ()


def _tried(job: Job, fields: dict[str, Any]) -> Job | None:
    try:
        return job.with_layout(replace(job.layout, **fields))
    except UsageError:
        return None


def _change(job: Job, fields: dict[str, Any], need: float, planner: Planner | None) -> Change:
    seconds = None
    if planner is not None and job.layout.gpus <= planner.cluster.gpus:
        seconds = planner.time(job).seconds
    return Change(
        what=", ".join(_said(*item) for item in fields.items()), layout=job.layout, total=need, seconds=seconds
    )


def _said(name: str, value: object) -> str:
    if name == "recompute":
        parts = value if isinstance(value, tuple) else (value,)
        value = "full" if parts == ("layer",) else "+".join(map(str, parts)) or "none"
    return f"{name}={value}"
