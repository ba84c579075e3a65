"""A made-up profile, a made-up timing and a made-up machine, whose times are round."""

from __future__ import annotations

import dataclasses

from made_up import profile as tiny  # type: ignore[import-not-found]

from nearpeak.machines.calibrations import CalibrationKey
from nearpeak.measure.timing import Block, Environment, Timing, make_flag
from nearpeak.ops.work import Work
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.profile import Profile

KEY = CalibrationKey(device="Toy 1", driver="1.0", torch="2.13.0")

FINDING = Finding(
    rule="unfused-norm",
    title="A norm is written as 5 ops.",
    source="model.py:41",
    modules=("layers.0.norm", "layers.1.norm"),
    places=2,
    saving_s=0.8,
    share=0.08,
    evidence="5 ops.",
    reasoning="One kernel.",
    remedy="x = norm(x)\nif x:\n    y",
)


def profile(wall_s: float = 10.0, **changes: object) -> Profile:
    """10 s a step, 9.9 to 10.1; as written 3 s, fused 2 s, ideal 1 s; 2 GiB; one finding of 8 %; grade A."""
    walls = tuple(wall_s * (1 + 0.001 * step) for step in range(-10, 11))
    memory = PeakMemory(
        device="cuda:0",
        capacity_bytes=None,
        peak_bytes=2.0 * 2**30,
        parameters_bytes=2.0**30,
        gradients_bytes=0.0,
        optimizer_bytes=0.0,
        activations_bytes=2.0**30,
        source="model.py:7",
    )
    made = {
        "steps": len(walls),
        "walls": walls,
        "spread": 0.02,
        "matched": 1.0,
        "modeled_share": 1.0,
        "memory": memory,
        "findings": (FINDING,),
        **changes,
    }
    return dataclasses.replace(tiny(wall_s), **made)


def timing(**changes: object) -> Timing:
    """10 us of a call, 9.9 to 10.1; the bound is 5 us; grade A."""
    made = Timing(
        name="softmax",
        seconds=10e-6,
        low=9.9e-6,
        high=10.1e-6,
        confidence=0.95,
        kind="device",
        method="made up",
        cache="cold",
        regime="burst",
        blocks=(Block(seconds=10e-6, readings=(10e-6,)),),
        flags=(),
        environment=Environment(
            device="Toy 1", driver="1.0", torch="2.13.0", python="3.11", nearpeak="0", date="2026-01-02", threads=1
        ),
        work=Work(bytes_read=5.0),
        bound_seconds=5e-6,
        bound_limiter="memory",
    )
    return dataclasses.replace(made, **changes)


DOUBTFUL = (make_flag("LAUNCH_NOT_HIDDEN", "the device waited"),)
"""Flags that make a timing's grade F."""
