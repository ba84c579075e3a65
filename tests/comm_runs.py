"""A run of `nearpeak comm` that was made up: two ranks, two operations, and a pattern."""

from __future__ import annotations

from nearpeak.comm.result import CommPoint, CommRun, LinkLimit, PatternTiming, fit_points
from nearpeak.measure.timing import Environment, make_flag

ENVIRONMENT = Environment(
    device="NVIDIA H100 80GB HBM3",
    driver="580.1",
    torch="2.13.0",
    python="3.12.1",
    nearpeak="0.1.0",
    date="2026-01-01T00:00:00+00:00",
    threads=1,
)


def point(op: str = "all_reduce", size: int = 2**20, seconds: float | None = None, **changes) -> CommPoint:
    """Latency of 20 us, and 100 GB/s of algorithm bandwidth."""
    taken = 20e-6 + size / 100e9 if seconds is None else seconds
    fields = {
        "op": op,
        "group": "world",
        "ranks": 8,
        "concurrent": 1,
        "nodes": 1,
        "dtype": "bfloat16",
        "in_place": op == "all_reduce",
        "bytes": size,
        "wire_bytes": size * (1.75 if op == "all_reduce" else 0.875),
        "seconds": taken,
        "low": 0.98 * taken,
        "high": 1.03 * taken,
        "confidence": 0.96,
        "skew_s": 0.1 * taken,
        "shortest_rank": 3,
        "shortest_share": 0.5,
        "readings": (taken,) * 3,
    }
    return CommPoint(**{**fields, **changes})


def run(**changes) -> CommRun:
    """Curves of two operations over eight H100."""
    points = tuple(point(op, 4**power) for op in ("all_reduce", "all_gather") for power in range(5, 14))
    pattern = PatternTiming(
        name="data parallel",
        what="DDP over 4 layers",
        step_s=12e-3,
        compute_s=10e-3,
        communication_s=5e-3,
        predicted_s=11e-3,
        predicted_communication_s=4.5e-3,
        difference=1e-7,
        tolerance=1e-3,
        steps=40,
    )
    fields = {
        "backend": "nccl 2.27.3",
        "ranks": 8,
        "nodes": 1,
        "mesh": (),
        "environment": ENVIRONMENT,
        "method": "CUDA events around each call",
        "points": points,
        "fits": fit_points(points),
        "links": (LinkLimit(group="world", bandwidth=450e9, kind="catalogue", source="NVLink 4 of h100-sxm"),),
        "patterns": (pattern,),
        "missing": {"reduce, int8": "not offered by nccl: no"},
        "notes": ("A note.",),
    }
    return CommRun(**{**fields, **changes})


WRONG = point(wrong_ranks=(1,), flags=(make_flag("WRONG_RESULT", "3 elements on rank 1"),))
