"""A barrier between the programs that share a row, within one launch.

A part is claimed by a ticket (an atomic counter), so that the programs of a row start one after another and a launch always ends.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.tuning import processors

MAX_PARTS = 32
"""Of a row: of several such kernels at a time on different streams, each can have all parts of a row at work."""
_PROGRAMS = 264
"""That an H200 runs at a time, of 16 warps each. On others these numbers decide on speed alone."""
_CACHE_BYTES = 36 * 2**20
"""Bytes that stay in its cache, of 50 MiB, between two readings."""
_MIN_PART = 16384
ALL, FIRST, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a launch does: all with a meeting between the halves, or one half."""
PHASES = (FIRST, LAST) if INTERPRETED else (ALL,)


def split_row(
    rows: int, columns: int, row_bytes: int, device: torch.device, part: int | None = None
) -> tuple[int, int]:  # fmt: skip
    """How many columns a part has, and how many parts a row: `part`, where that is given.

    Otherwise so many that all processors are at work, and that the rows at work fit into the cache.
    """
    if part is None:
        parts = next_power_of_2(triton.cdiv(_PROGRAMS * max(row_bytes, _CACHE_BYTES // max(rows, 1)), _CACHE_BYTES))
        part = max(next_power_of_2(triton.cdiv(columns, parts)), _MIN_PART)
    part = max(part, next_power_of_2(triton.cdiv(columns, min(MAX_PARTS, processors(device)))))
    return part, triton.cdiv(columns, part)


def split_candidates(columns: int) -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of so many columns that are split."""
    split: dict[str, Any] = {"variant": "split", "stages": 1, "hints": True, "kept": False}
    loops = [{**split, "warps": warps, "steps": steps} for warps, steps in ((8, 4), (8, 8), (16, 4), (16, 8), (32, 4))]
    found = [*loops, {**split, "warps": 16, "steps": 4, "stages": 3}]
    found += [{**one, "hints": False} for one in loops]
    found += [
        {**split, "warps": warps, "steps": steps, "kept": True} for warps, steps in ((16, 4), (16, 8), (32, 2), (32, 4))
    ]
    if columns > 32768:
        found += [{**one, "part": part} for one in loops[1:4] for part in (16384, 32768, 65536) if part < columns]
        found += [{**split, "warps": 16, "steps": 4, "kept": True, "part": 32768}]
    return found


def adapt_to_rows(config: dict[str, Any] | None, rows: int) -> dict[str, Any] | None:
    """A configuration that was measured with many rows, for these: few need more parts."""
    if config is None or rows >= _PROGRAMS // 4:
        return config
    return {name: value for name, value in config.items() if name != "part"}


def barrier_counters(rows: int, device: torch.device) -> Tensor:
    """The tickets that were drawn, and of each row how many parts are known."""
    return torch.zeros(1 + rows, dtype=torch.int32, device=device)


@triton.jit
def claim_part(counters, PHASE: tl.constexpr):
    """Which of all parts this program has."""
    if PHASE == ALL:
        return tl.atomic_add(counters, 1, sem="relaxed")
    if PHASE == LAST:
        return tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is nearest
    return tl.program_id(0)


@triton.jit
def arrive(counters, row):
    """Tells that a part of a row is known, with all that this program stored before."""
    tl.debug_barrier()
    tl.atomic_add(counters + 1 + row, 1, sem="release")


@triton.jit
def wait(counters, row, parts):
    """Waits for all parts of a row. What was stored before they arrived is seen by loads from the L2 cache."""
    while tl.atomic_add(counters + 1 + row, 0, sem="relaxed") < parts:
        pass
    tl.atomic_add(counters + 1 + row, 0, sem="acquire")  # once: each empties the L1 cache
    tl.debug_barrier()


@triton.jit
def arrive_and_wait(counters, row, parts):
    """Waits for the other parts of a row. What they stored before is seen by loads from the L2 cache after this."""
    arrive(counters, row)
    wait(counters, row, parts)
