"""`ranking`: the lost time of a profile by op, module, source line, phase or family, the largest loss first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from nearpeak.profiles.profile import Profile, ProfiledOp

GroupBy = Literal["op", "module", "line", "phase", "family"]

_KEYS: Mapping[GroupBy, Callable[[ProfiledOp], str]] = {
    "op": lambda op: f"{op.name} {op.phase}",
    "module": lambda op: op.module,
    "line": lambda op: op.source,
    "phase": lambda op: op.phase,
    "family": lambda op: op.family,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedOps:
    """Ops that share a key."""

    key: str
    ops: int
    measured_s: float
    bound_s: float
    fused_s: float | None
    """The sum of shares of fusion groups; None if one of them is not known."""
    expected_s: float | None
    lost_s: float
    limiter: str
    """Of the op with the largest bound."""
    modeled: bool


def ranking(profile: Profile, by: GroupBy = "op") -> tuple[RankedOps, ...]:
    """All ops that ran on the device, grouped. Ops without a bound are ranked by their whole time."""
    groups: dict[str, list[ProfiledOp]] = {}
    for op in profile.ops:
        if op.kernels or op.bound_s > 0.0:
            groups.setdefault(_KEYS[by](op), []).append(op)
    ranks = [_ranked_ops(key, ops) for key, ops in groups.items()]
    return tuple(sorted(ranks, key=lambda rank: -(rank.lost_s if rank.modeled else rank.measured_s)))


def _ranked_ops(key: str, ops: list[ProfiledOp]) -> RankedOps:
    fused = [op.fused_s for op in ops if op.fused_s is not None]
    expected = [op.expected_s for op in ops if op.expected_s is not None]
    return RankedOps(
        key=key,
        ops=len(ops),
        measured_s=sum(op.measured_s for op in ops),
        bound_s=sum(op.bound_s for op in ops),
        fused_s=sum(fused) if len(fused) == len(ops) else None,
        expected_s=sum(expected) if expected else None,
        lost_s=sum(op.lost_s for op in ops),
        limiter=max(ops, key=lambda op: op.bound_s).limiter,
        modeled=any(op.modeled for op in ops),
    )
