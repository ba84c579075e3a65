"""How programs that share a row tell each other of their parts of it, within one launch.

A part is known by a ticket, which programs draw as they begin: those of one row begin one after another, whatever the
order of their numbers, and all that wait for a part have begun no earlier than it. Only the programs of one row wait
for each other, so that a launch ends wherever so many can run at the same time; there are `MOST_PARTS` at most.

The interpreter runs programs one after another. There, the first half of the work is one launch and the second another.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import next_power_of_2
from nearpeak.kernels.policy import INTERPRETED

MOST_PARTS = 32
"""Of a row: of several such kernels at a time on different streams, each can have all parts of a row at work."""
_PROGRAMS = 264
"""That an H200 runs at a time, of 16 warps each. On others these numbers decide on speed alone."""
_CACHED = 36 * 2**20
"""Bytes that stay in its cache, of 50 MiB, between two readings."""
_LEAST_PART = 16384
ALL, FIRST, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a launch does: all with a meeting between the halves, or one half."""
PHASES = (FIRST, LAST) if INTERPRETED else (ALL,)


def split(rows: int, columns: int, row_bytes: int, part: int | None = None) -> tuple[int, int]:
    """How many columns a part has, and how many parts a row: `part`, where that is given.

    Otherwise so many that all processors are at work, and that the rows at work fit into the cache.
    """
    if part is None:
        parts = next_power_of_2(triton.cdiv(_PROGRAMS * max(row_bytes, _CACHED // max(rows, 1)), _CACHED))
        part = max(next_power_of_2(triton.cdiv(columns, parts)), _LEAST_PART)
    part = max(part, next_power_of_2(triton.cdiv(columns, MOST_PARTS)))
    return part, triton.cdiv(columns, part)


def split_candidates(columns: int) -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of so many columns that are split."""
    loops = [(8, 4), (8, 8), (16, 4), (16, 8), (32, 2), (32, 4)]
    found: list[dict[str, Any]] = [
        {"variant": "split", "steps": steps, "warps": warps, "stages": 1, "hints": hints}
        for warps, steps in loops
        for hints in (True, False)
    ]
    found.append({"variant": "split", "steps": 4, "warps": 16, "stages": 3, "hints": True})
    if columns > 32768:
        found += [{**one, "part": part} for one in found[2:8:2] for part in (16384, 32768, 65536) if part < columns]
    return found


def as_measured(config: dict[str, Any] | None, rows: int) -> dict[str, Any] | None:
    """A configuration that was measured with many rows, for these: few need more parts."""
    if config is None or rows >= _PROGRAMS // 4:
        return config
    return {name: value for name, value in config.items() if name != "part"}


def counters(rows: int, device: torch.device) -> Tensor:
    """The tickets that were drawn, and of each row how many parts are known."""
    return torch.zeros(1 + rows, dtype=torch.int32, device=device)


@triton.jit
def turn(counters, PHASE: tl.constexpr):
    """Which of all parts this program has."""
    if PHASE == ALL:
        return tl.atomic_add(counters, 1, sem="relaxed")
    if PHASE == LAST:
        return tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is nearest
    return tl.program_id(0)


@triton.jit
def meet(counters, row, parts):
    """Waits for the other parts of a row. What they stored before is seen by loads from the L2 cache after this."""
    tl.debug_barrier()
    tl.atomic_add(counters + 1 + row, 1, sem="release")
    while tl.atomic_add(counters + 1 + row, 0, sem="acquire") < parts:
        pass
    tl.debug_barrier()
