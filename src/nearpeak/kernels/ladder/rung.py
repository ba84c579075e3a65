"""`Rung`: a way to multiply matrices, its tile, and the bytes that it asks memory for.

**What is counted**: bytes of both matrices that go from global memory into the registers or the shared memory of the
processors. It is the one level that follows from a kernel's source alone. Below it caches decide: the same bytes may
come from the L1 cache, from L2 or from DRAM.

- Threads that load by themselves ask the L1 cache, in sectors of 32 bytes: each load of a warp counts as many sectors
  as its threads touch, whether they hit or not. The counter is `l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum`.
- Asynchronous copies and TMA go past the L1 cache into shared memory: all that is asked for arrives at the processor.
  The counter is `l1tex__m_xbar2l1tex_read_bytes.sum`, bytes that came to processors from L2. What L2 counts itself,
  `lts__t_sectors_srcunit_tex_op_read.sum`, is no measure of that: where several processors ask for the same sectors at
  the same time it reads them once for all, and on an H200 counts 36 % to 55 % less.

A tile of `rows` x `columns` results needs (rows + columns) numbers for each step of the depth, and there are
m n / (rows columns) tiles: bytes = m n k (1 / rows + 1 / columns) * 2. A cluster of processors that share what they
load asks L2 for less, but to each of them arrives what its own tile needs.

**DRAM** is not predicted beyond its floor, each matrix once: whether a tile's neighbours find its numbers in L2 depends
on the order of tiles and on what a cache of 50 MB evicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

SECTOR = 32
"""Bytes that a cache looks up, and moves, at least."""
ITEM = 2
"""Bytes of a bfloat16."""
BY_THREADS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
PAST_L1 = "l1tex__m_xbar2l1tex_read_bytes.sum"
BYTES = {BY_THREADS: SECTOR, PAST_L1: 1}
"""What one count of a counter stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The results that share what is loaded."""

    rows: int
    columns: int
    row_bytes: int = ITEM
    """What a number of the first matrix costs: a whole sector where a load is of one number."""

    def bytes_read(self, m: int, n: int, k: int) -> int:
        """Bytes asked for in a product of m x k by k x n. Tiles at the edge count in full."""
        tiles = math.ceil(m / self.rows) * math.ceil(n / self.columns)
        return tiles * k * (self.rows * self.row_bytes + self.columns * ITEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A way to multiply matrices."""

    name: str
    title: str
    """What it is, in up to 30 characters."""
    kernel: str
    """A regular expression for the names of its kernels."""
    counter: str
    """Of ncu, one of `BYTES`."""
    multiply: Callable[[Tensor, Tensor], Tensor]
    tile: Callable[[int, int, int, str], Tile | None]
    """By m, n, k and the name of the kernel that ran, if that is known. None where nobody knows."""

    def bytes_read(self, m: int, n: int, k: int, kernel: str = "") -> int | None:
        """The traffic that its tile predicts."""
        tile = self.tile(m, n, k, kernel)
        return None if tile is None else tile.bytes_read(m, n, k)

    def intensity(self, n: int, kernel: str = "") -> float | None:
        """Operations for each of these bytes, for square matrices."""
        moved = self.bytes_read(n, n, n, kernel)
        return None if moved is None else 2.0 * n**3 / moved


def floor_bytes(m: int, n: int, k: int) -> int:
    """What DRAM moves at least: each matrix once, and the result."""
    return ITEM * (m * k + k * n + m * n)
