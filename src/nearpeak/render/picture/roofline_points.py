"""What a roofline shows: ops merged into points, and the ceilings of a machine as roofs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.errors import UsageError
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.profiles.profile import ProfiledOp
from nearpeak.render.views.timing import plain

MOST_POINTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPoint:
    """Ops that are one point: the same operator at the same place with the same limiter, over all layers.

    Those that compute nothing are merged over all places.
    """

    name: str
    place: str
    """The module with "*" for the numbers of layers, or the line where there is no module."""
    phase: str
    family: str
    limiter: str
    count: int
    flops: float
    bytes: float
    seconds: float
    share: float
    """Of the as-written time."""

    @property
    def intensity(self) -> float | None:
        """FLOP per byte; None where nothing is computed, infinite where nothing moves."""
        if not self.flops:
            return None
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def rate(self) -> float:
        """FLOP/s at the bound: what the machine allows for these ops."""
        return self.flops / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A rate of arithmetic that no op exceeds. `used` says whether an op runs on it."""

    name: str
    rate: float
    used: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedOp:
    """An op with the time and the bytes that are to count."""

    op: EstimatedOp | ProfiledOp
    seconds: float
    bytes: float


def estimate_points(estimate: Estimate, most: int = MOST_POINTS) -> tuple[OpPoint, ...]:
    """The ops as points, largest share of the as-written time first; beyond `most`, those of a family are one."""
    counted = [
        WeightedOp(op=op, seconds=op.seconds, bytes=op.bytes_read + op.bytes_written)
        for op in estimate.ops
        if op.seconds > 0
    ]
    return merge_points(counted, estimate.as_written_s, most)


def merge_points(counted: Iterable[WeightedOp], total: float, most: int = MOST_POINTS) -> tuple[OpPoint, ...]:
    """The same of any ops; shares are of `total` seconds."""
    merged: dict[tuple[str, ...], list[WeightedOp]] = {}
    for one in counted:
        op = one.op
        computes, where = ("computes", _module_or_line(op)) if op.flops else ("", "")
        merged.setdefault((op.name, where, op.phase, op.family, op.limiter, computes), []).append(one)
    ranked = sorted(merged.items(), key=lambda item: -sum(one.seconds for one in item[1]))
    rest: dict[tuple[str, ...], list[WeightedOp]] = {}
    for (_, _, _, family, limiter, computes), ones in ranked[most:]:
        rest.setdefault((f"other {family}", "", "", family, limiter, computes), []).extend(ones)
    found = [_merge_ops(key, ones, total) for key, ones in (*ranked[:most], *rest.items())]
    return tuple(sorted(found, key=lambda point: -point.seconds))


def _merge_ops(key: tuple[str, ...], counted: list[WeightedOp], total: float) -> OpPoint:
    name, place, phase, family, limiter, _ = key
    seconds = sum(one.seconds for one in counted)
    return OpPoint(
        name=operator_name(name),
        place=plain(place, 60),
        phase=plain(phase, 20),
        family=plain(family, 20),
        limiter=plain(limiter, 20),
        count=len(counted),
        flops=sum(one.op.flops for one in counted),
        bytes=sum(one.bytes for one in counted),
        seconds=seconds,
        share=seconds / total if total else 0.0,
    )


def is_above_bandwidth(point: OpPoint, bandwidth: float) -> bool:
    """Whether a point lies above the roof of a bandwidth, so that a cache must have served a part of it."""
    return point.intensity is not None and point.rate > 1.02 * point.intensity * bandwidth


def operator_name(name: str) -> str:
    """An operator without what all have: "aten.mul.Tensor" is "mul", "mine.kernel.default" is "mine.kernel"."""
    packet = name.rpartition(".")[0] if name.count(".") > 1 else name
    return plain(packet.removeprefix("aten.").removeprefix("inductor.triton_"), 60)


def _module_or_line(op: EstimatedOp | ProfiledOp) -> str:
    if op.module:
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", op.module)
    return op.source.rpartition("/")[2]


def ceilings_of(machine: Machine, estimate: Estimate) -> Achievable | Theoretical:
    """The ceilings that the estimate was made against."""
    if machine.id != estimate.machine:
        raise UsageError(f"The estimate is for {estimate.machine}, and the machine that was given is {machine.id}.")
    limits = machine.achievable if estimate.ceilings == "achievable" else machine.theoretical
    if limits is None:
        raise UsageError(f"{machine.name} has no {estimate.ceilings} ceilings.")
    return limits


def engine_rate(limits: Achievable | Theoretical, engine: str, dtype: str) -> float | None:
    """FLOP/s of an engine; that of the other one where it has no figure for the dtype."""
    rates = limits.matrix if _engine_of(limits, engine, dtype) == "matrix" else limits.vector
    return rates.get(dtype)


def _engine_of(limits: Achievable | Theoretical, engine: str, dtype: str) -> str:
    other, rates = ("vector", limits.matrix) if engine == "matrix" else ("matrix", limits.vector)
    return engine if dtype in rates else other


def estimate_roofs(estimate: Estimate, limits: Achievable | Theoretical) -> tuple[Roof, ...]:
    """The roofs of all dtypes, highest first; dtypes of one engine with the same rate share one."""
    used = {(_engine_of(limits, op.engine, op.dtype), op.dtype) for op in estimate.ops if op.flops}
    found = [*_engine_roofs("matrix", limits.matrix, used), *_engine_roofs("vector", limits.vector, used)]
    return tuple(sorted(found, key=lambda roof: -roof.rate))


def _engine_roofs(engine: str, rates: Mapping[str, float], used: Iterable[tuple[str, str]]) -> list[Roof]:
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in rates.items():
        if rate > 0:
            by_rate.setdefault(rate, []).append(dtype)
    return [
        Roof(
            name=f"{', '.join(dtypes)} {engine}",
            rate=rate,
            used=any((engine, dtype) in used for dtype in dtypes),
        )
        for rate, dtypes in by_rate.items()
    ]
