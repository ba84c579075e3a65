"""Real runs on an H200, reduced to what a difference is made of, and runs simulated from them.

`data/NAME.json.gz` has the ops of a saved profile that ran on the device: the kinds of ops, the kind of each op in the
order of the step, and its nanoseconds. A vision transformer and a mixture of experts, trained by the same script in two
processes an hour apart, one step profiled in each; the first also compiled.
"""

import dataclasses
import gzip
import json
import math
import random
import statistics
from functools import cache
from pathlib import Path

from nearpeak.diffs.match import module_pattern, operator_name
from nearpeak.ops.op import origin_of_name
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.profile import SCHEMA, Profile, ProfileCeilings, ProfiledOp, typical_seconds
from nearpeak.profiles.waterfall import Part, Waterfall

BANDWIDTH = 4.7e12
DATA = Path(__file__).parent / "data"
SINGLE = 0.007
"""The noise of an op that has no equals: such ops differ by half of it between the two runs of a model."""
MOST = 0.08
"""Ops of one kind that differ by more are no equals: other kernels, or served from the cache."""


@cache
def real(name: str) -> Profile:
    data = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    kinds = [_op(*fields) for fields in data["kinds"]]
    ops = tuple(
        dataclasses.replace(kinds[at], measured_s=1e-9 * nanoseconds)
        for at, nanoseconds in zip(data["index"], data["nanoseconds"], strict=True)
    )
    names = {"not modelled": "not modeled"}  # the files are older than the spelling
    parts = tuple(Part(name=names.get(part, part), seconds=seconds) for part, seconds in data["parts"].items())
    return Profile(
        schema=SCHEMA,
        source="train.py",
        date="2026-01-02T03:04:05+00:00",
        device=data["device"],
        machine=data["machine"],
        how=data["how"],
        wall_s=data["wall_s"],
        kernel_s=sum(op.measured_s for op in ops),
        communication_s=0.0,
        as_written_s=0.0,
        fused_s=0.0,
        ideal_s=0.0,
        expected_s=None,
        waterfall=Waterfall(wall_s=data["wall_s"], parts=parts),
        modeled_share=1.0,
        flops=data["flops"],
        ops=ops,
        idle=tuple(IdleCause(**cause) for cause in data["idle"]),
        steps=data["steps"],
        walls=tuple(data["walls"]),
        spread=data["spread"],
        ceilings=ProfileCeilings(bandwidth=4.6962e12),
    )


def _op(name, family, phase, module, source, shapes, kernels, limiter, flops, moved, bound_s) -> ProfiledOp:
    return ProfiledOp(
        name=name,
        origin=origin_of_name(name),
        family=family,
        phase=phase,
        module=module,
        source=source,
        shapes=tuple(map(tuple, shapes)),
        kernels=kernels,
        measured_s=0.0,
        bound_s=bound_s,
        expected_s=None,
        limiter=limiter,
        flops=flops,
        bytes=moved,
        modeled=True,
    )


def kind(op: ProfiledOp):
    return operator_name(op), op.phase, op.shapes, module_pattern(op)


def scaled(profile: Profile, chosen, factor: float) -> Profile:
    """The run with some ops slower, and the step with them."""
    ops = tuple(_longer(op, factor) if chosen(op) else op for op in profile.ops)
    more_s = sum(op.measured_s for op in ops) - profile.kernel_s
    return dataclasses.replace(
        profile,
        ops=ops,
        kernel_s=profile.kernel_s + more_s,
        wall_s=profile.wall_s + more_s,
        walls=tuple(wall + more_s for wall in profile.walls),
    )


def _longer(op: ProfiledOp, factor: float) -> ProfiledOp:
    times = {name: getattr(op, name) for name in ("measured_s", "typical_s", "quickest_s", "slowest_s")}
    return dataclasses.replace(op, **{name: factor * took for name, took in times.items() if took is not None})


def simulated(profile: Profile, seed: int, *, clock: float | None = None) -> Profile:
    """Another run of five profiled steps: the clock differs by up to 3 % from run to run and by 2 % from step to step,
    each kernel follows it by its elasticity and has the noise of its equals, and so do the clean steps."""
    chance = random.Random(seed)
    noise = _spreads(profile)
    clock = chance.uniform(-0.03, 0.03) if clock is None else clock
    clocks = [clock + chance.uniform(-0.02, 0.02) for _ in range(5)]
    order = sorted(range(5), key=clocks.__getitem__)
    ops = []
    for op in profile.ops:
        follows, spread = elasticity(op), noise[_equal(op)]
        times = [op.measured_s * math.exp(follows * one + chance.gauss(0.0, spread)) for one in clocks]
        ops.append(
            dataclasses.replace(
                op,
                measured_s=times[order[2]],
                typical_s=typical_seconds(times),
                quickest_s=times[order[0]],
                slowest_s=times[order[-1]],
            )
        )
    wall_s = profile.wall_s * math.exp(chance.gauss(0.0, 0.003))
    walls = tuple(wall_s * math.exp(chance.gauss(0.0, 0.003)) for _ in range(10))
    return dataclasses.replace(
        profile,
        ops=tuple(ops),
        kernel_s=sum(op.measured_s for op in ops),
        wall_s=statistics.fmean(walls),
        walls=walls,
        spread=(max(walls) - min(walls)) / wall_s,
    )


def elasticity(op: ProfiledOp) -> float:
    """How many times as far as products it moves with the clock: what waits for memory not at all, others may."""
    if op.limiter == "compute":
        return 1.0
    if op.limiter == "memory" and op.bytes >= 0.75 * BANDWIDTH * op.measured_s:
        return 0.0
    return _drawn(kind(op))


@cache
def _drawn(one) -> float:
    return random.Random(repr(one)).choice((0.0, 1.0, 1.7))


def _equal(op: ProfiledOp):
    return *kind(op), op.bytes, op.kernels


def _spreads(profile: Profile):
    times = {}
    for op in profile.ops:
        times.setdefault(_equal(op), []).append(op.measured_s)
    return {key: _spread(values) for key, values in times.items()}


def _spread(values) -> float:
    if len(values) < 3:
        return SINGLE
    middle = statistics.median(values)
    return min(MOST, 1.4826 * statistics.median(abs(value - middle) for value in values) / middle)
