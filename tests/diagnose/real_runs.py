"""Real runs on an H200, reduced to what a difference is made of, and runs simulated from them.

`data/NAME.json.gz` has the ops of a saved profile that ran on the device, without bounds: the kinds of ops, the kind of
each op in the order of the step, and its nanoseconds. A vision transformer and a mixture of experts, trained by the
same script in two processes an hour apart; the first also compiled.
"""

import dataclasses
import gzip
import json
import math
import random
import statistics
from functools import cache
from pathlib import Path

from nearpeak.diagnose.idle import IdleCause
from nearpeak.diagnose.matching import packet, path
from nearpeak.diagnose.profile import SCHEMA, Profile, ProfiledOp
from nearpeak.diagnose.waterfall import Part, Waterfall

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
    parts = tuple(Part(name=part, seconds=seconds) for part, seconds in data["parts"].items())
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
        modelled_share=1.0,
        flops=data["flops"],
        ops=ops,
        idle=tuple(IdleCause(**cause) for cause in data["idle"]),
        steps=data["steps"],
        walls=tuple(data["walls"]),
        spread=data["spread"],
    )


def _op(name, family, phase, module, source, shapes, kernels, limiter, flops, moved) -> ProfiledOp:
    return ProfiledOp(
        name=name,
        family=family,
        phase=phase,
        module=module,
        source=source,
        shapes=tuple(map(tuple, shapes)),
        kernels=kernels,
        measured_s=0.0,
        bound_s=0.0,
        expected_s=None,
        limiter=limiter,
        flops=flops,
        bytes=moved,
        modelled=True,
    )


def kind(op: ProfiledOp):
    return packet(op), op.phase, op.shapes, path(op)


def scaled(profile: Profile, chosen, factor: float) -> Profile:
    """The run with some ops slower, and the step with them."""
    ops = tuple(dataclasses.replace(op, measured_s=factor * op.measured_s) if chosen(op) else op for op in profile.ops)
    more_s = sum(op.measured_s for op in ops) - profile.kernel_s
    return dataclasses.replace(
        profile,
        ops=ops,
        kernel_s=profile.kernel_s + more_s,
        wall_s=profile.wall_s + more_s,
        walls=tuple(wall + more_s for wall in profile.walls),
    )


def simulated(profile: Profile, seed: int) -> Profile:
    """Another run: all kernels drift by up to 2 %, each has the noise of its equals, and so do the clean steps."""
    chance = random.Random(seed)
    noise = _spreads(profile)
    drift = math.exp(chance.uniform(-0.02, 0.02))
    ops = tuple(
        dataclasses.replace(op, measured_s=op.measured_s * drift * math.exp(chance.gauss(0.0, noise[_equal(op)])))
        for op in profile.ops
    )
    wall_s = profile.wall_s * math.exp(chance.gauss(0.0, 0.003))
    walls = tuple(wall_s * math.exp(chance.gauss(0.0, 0.003)) for _ in range(10))
    return dataclasses.replace(
        profile,
        ops=ops,
        kernel_s=sum(op.measured_s for op in ops),
        wall_s=statistics.fmean(walls),
        walls=walls,
        spread=(max(walls) - min(walls)) / wall_s,
    )


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
