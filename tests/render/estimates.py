"""Made-up estimates and a made-up machine, for the tests of what shows them."""

from __future__ import annotations

from nearpeak.bound.estimate import Coverage, Estimate, EstimatedOp
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.ops.work import Work


def machine(cache_bandwidth: float | None = None) -> Machine:
    """1 TB/s of memory, 100 TFLOP/s of bfloat16 products, 10 TFLOP/s of float32 vectors."""
    rates = {
        "matrix": {"bfloat16": 1e14, "float16": 1e14, "float8": 2e14},
        "vector": {"float32": 1e13},
        "bandwidth": 1e12,
    }
    return Machine(
        id="toy",
        name="Toy 1",
        kind="gpu",
        vendor="none",
        architecture="none",
        processors=10,
        memory_bytes=1e9,
        theoretical=Theoretical(source="made up", **rates),
        achievable=Achievable(how="measured", note="made up", cache_bandwidth=cache_bandwidth, **rates),
    )


def op(name: str = "aten.mm.default", seconds: float = 1e-3, **fields: object) -> EstimatedOp:
    return EstimatedOp(
        **{
            "name": name,
            "family": "matrix",
            "flops": 2e9,
            "bytes_read": 4e6,
            "bytes_written": 2e6,
            "seconds": seconds,
            "limiter": "compute",
            "module": "layers.0",
            "phase": "forward",
            "source": "/home/me/train.py:41",
            "model": "formula",
            "engine": "matrix",
            "dtype": "bfloat16",
            "shapes": ((512, 256), (256, 128)),
            **fields,
        }
    )


def product(**fields: object) -> EstimatedOp:
    """1e11 FLOP in 1 ms over 1e8 bytes: at the roof of the toy, FLOP per byte 1000."""
    return op(**{"flops": 1e11, "bytes_read": 9e7, "bytes_written": 1e7, **fields})


def addition(**fields: object) -> EstimatedOp:
    """1e8 FLOP over 1e9 bytes in 1 ms: at the memory's roof of the toy, FLOP per byte 0.1."""
    facts = {"family": "pointwise", "flops": 1e8, "bytes_read": 6e8, "bytes_written": 4e8, "limiter": "memory"}
    return op(**{"name": "aten.add.Tensor", **facts, "engine": "vector", "dtype": "float32", **fields})


def copy(**fields: object) -> EstimatedOp:
    """A copy: bytes and no FLOP."""
    facts = {"family": "movement", "flops": 0.0, "bytes_read": 5e8, "bytes_written": 5e8, "limiter": "memory"}
    return op(**{"name": "aten.clone.default", **facts, "engine": "", "dtype": "", **fields})


def estimate(ops: list[EstimatedOp], unmodeled: dict[str, int] | None = None, **fields: object) -> Estimate:
    return Estimate(
        **{
            "machine": "toy",
            "ceilings": "achievable",
            "how": "measured",
            "as_written_s": sum(one.seconds for one in ops),
            "fused_s": 0.5e-3,
            "ideal_s": 0.25e-3,
            "work": Work(flops={"bfloat16": 4e9}, bytes_read=8e6, bytes_written=4e6),
            "ops": tuple(ops),
            "groups": (),
            "coverage": Coverage(formula=len(ops), operands=0, none=0, seconds_share=1.0, unmodeled=unmodeled or {}),
            **fields,
        }
    )
