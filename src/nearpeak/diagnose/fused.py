"""`fused_seconds`: the fused floor of a step, shared out over its ops."""

from __future__ import annotations

from nearpeak.bound.estimate import Estimate


def fused_seconds(estimate: Estimate) -> list[float | None]:
    """For each op its share of the bound of its group as one kernel; None for all where no groups are known.

    A group has one time, and no op of it has one of its own. It is shared out in proportion to the bounds of the ops as
    written, so that they sum to the floor of the whole. An op may get a little more than its bound: regrouped, what it
    reads may have left the cache.
    """
    if not estimate.group_seconds:
        return [None] * len(estimate.ops)
    bounds = [op.seconds for op in estimate.ops]
    if (
        sum(estimate.group_seconds) >= estimate.as_written_s
    ):  # regrouping would not pay: the ops stay as they are written
        return list(bounds)
    shared: list[float | None] = [0.0] * len(bounds)
    for group, seconds in zip(estimate.groups, estimate.group_seconds, strict=True):
        written = sum(bounds[member] for member in group.members)
        for member in group.members:
            shared[member] = seconds * bounds[member] / written if written else seconds / len(group.members)
    return shared
