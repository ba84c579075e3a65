"""A barrier between the programs that share a row, within one launch.

A row that is too long for one program has several parts, and a program for each. A program claims its part with a
ticket, an atomic counter, when it starts: the programs of a row start one after another, whatever their program ids,
and only the programs of one row wait for each other. So a launch always ends if all parts of one row can run at the
same time: a row has at most `MAX_PARTS`, and no more than the GPU has multiprocessors.

Triton's interpreter runs one program after another. There, each half of the work is a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.tuning import processors

_Config = TypeVar("_Config")

MAX_PARTS = 32
"""Parts per row. Small enough that several such kernels, on different streams, can each run all parts of a row."""
_PROGRAMS = 264
"""Programs of 16 warps that run at the same time on an H200. On other GPUs this affects speed alone."""
_CACHE_BYTES = 36 * 2**20
"""Bytes that stay in its L2 cache, of 50 MiB, between two reads."""
_MIN_PART = 16384
ALL, FIRST, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a launch does: both halves with a barrier between them, or one half."""
PHASES = (FIRST, LAST) if INTERPRETED else (ALL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Parts of a row, one program each, which reads its part twice."""

    variant: ClassVar[str] = "split"
    warps: int = 16
    steps: int = 4
    """Loads of 16 bytes that a thread has in flight."""
    stages: int = 1
    """With more than one, the next chunks are loaded to shared memory meanwhile."""
    hints: bool = True
    """Ask the cache to keep what was read first until it is read again."""
    kept: bool = False
    """Keep the first chunk in registers for the second pass."""
    part: int | None = None
    """Columns per part; None lets `split_row` decide."""


def split_row(
    rows: int, columns: int, row_bytes: int, device: torch.device, part: int | None = None
) -> tuple[int, int]:
    """Columns per part, and parts per row.

    Without `part` there are enough parts to occupy all multiprocessors, and to fit the rows in flight into the cache.
    """
    if part is None:
        parts = next_power_of_2(triton.cdiv(_PROGRAMS * max(row_bytes, _CACHE_BYTES // max(rows, 1)), _CACHE_BYTES))
        part = max(next_power_of_2(triton.cdiv(columns, parts)), _MIN_PART)
    part = max(part, next_power_of_2(triton.cdiv(columns, min(MAX_PARTS, processors(device)))))
    return part, triton.cdiv(columns, part)


def split_candidates(columns: int) -> list[SplitConfig]:
    """Configurations worth measuring for rows of this many columns."""
    loops = [SplitConfig(warps=warps, steps=steps) for warps, steps in ((8, 4), (8, 8), (16, 4), (16, 8), (32, 4))]
    configs = [*loops, SplitConfig(stages=3)]
    configs += [replace(config, hints=False) for config in loops]
    shapes = ((16, 4), (16, 8), (32, 2), (32, 4))
    configs += [SplitConfig(warps=warps, steps=steps, kept=True) for warps, steps in shapes]
    if columns > 32768:
        sizes = [part for part in (16384, 32768, 65536) if part < columns]
        configs += [replace(config, part=part) for config in loops[1:4] for part in sizes]
        configs += [SplitConfig(kept=True, part=32768)]
    return configs


def adapt_to_rows(config: _Config, rows: int) -> _Config:
    """A configuration that was measured with many rows, for this many: a few rows need more parts."""
    if isinstance(config, SplitConfig) and rows < _PROGRAMS // 4:
        return replace(config, part=None)
    return config


def barrier_counters(rows: int, device: torch.device) -> Tensor:
    """Zeros: a counter of the tickets drawn, and for each row one of the parts that arrived."""
    return torch.zeros(1 + rows, dtype=torch.int32, device=device)


@triton.jit
def claim_part(counters, PHASE: tl.constexpr):
    """The number of the part, of all rows, that this program works on."""
    if PHASE == ALL:
        return tl.atomic_add(counters, 1, sem="relaxed")
    if PHASE == LAST:
        return tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is still in the cache
    return tl.program_id(0)


@triton.jit
def arrive(counters, row):
    """Signals that a part of a row is done, with everything that this program stored before."""
    tl.debug_barrier()
    tl.atomic_add(counters + 1 + row, 1, sem="release")


@triton.jit
def wait(counters, row, parts):
    """Waits for all parts of a row. Loads from the L2 cache then see what was stored before they arrived."""
    while tl.atomic_add(counters + 1 + row, 0, sem="relaxed") < parts:
        pass
    tl.atomic_add(counters + 1 + row, 0, sem="acquire")  # once: each acquire empties the L1 cache
    tl.debug_barrier()


@triton.jit
def arrive_and_wait(counters, row, parts):
    """The barrier: waits for the other parts of a row."""
    arrive(counters, row)
    wait(counters, row, parts)
