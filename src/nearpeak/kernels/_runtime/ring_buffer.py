"""Ring buffers over long rows on Hopper: which program holds which part of which rows in shared memory.

A row that does not fit into the registers of a program would be read twice, or its programs would wait for each other
before each row is written. Here a program holds its part of several rows in a ring buffer in shared memory. At any time
some rows are being copied, the sums of the next one are computed and published to the other programs, and the row
before it, whose sums have long arrived, is written. Loads are always in flight, every byte moves once, and a program
hardly ever waits.

A launch has as many programs as run at the same time. The programs of a group hold the parts of one row and go through
rows together. A program draws its group and part as a ticket when it starts: at most one group of a launch is
incomplete, and the programs of complete groups wait only for each other, finish, and make room. What a program sums
depends on its ticket and not on where it runs, so that results are the same in every run.

This module is host code: `plan_ring`, which returns None for GPUs, versions of Triton and tensors that these kernels do
not support, and the configurations. The device code, in Gluon, is in `ring_buffer_sm90`; the kernels are in the `sm90`
module of each operation, and are imported when they are launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import triton
from torch import Tensor

from nearpeak.kernels._runtime.gluon import runs_on
from nearpeak.kernels._runtime.grid_counters import grid_counters
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.row_barrier import MAX_PARTS
from nearpeak.kernels._runtime.tuning import processors

FULL, ENDED, SHIFTED = range(3)
"""Modes: rows fill all parts; they end inside one, at 16 bytes; they are dense, but start and end anywhere."""
PARAMETER_MEMORY = ("global", "shared", "registers")
"""Where a part of the weight and the bias stays between two rows; in global memory means in a cache."""
SLOTS = 4
"""Rows whose sums are published at a time: no row is published before all have read the row four before it."""
MIN_ROW = 16384
"""Elements of 16 bits from which on a row is worth these kernels."""
HEADER_WORDS = 16
"""The first counts tickets, the middle one finished programs, on a cache line of its own."""
_SHARED_BYTES = 228 * 2**10
"""Of a multiprocessor. Each program takes `_RESERVED_BYTES` more than it asks for."""
_RESERVED_BYTES = 1024
_SCRATCH_BYTES = 512
"""For sums over the threads of a program."""
_MIN_TURNS = 3
"""Rows per group, fewer of which are not worth filling the ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingConfig:
    """Parts of rows in ring buffers in shared memory, on Hopper."""

    variant: ClassVar[str] = "parts"
    width: int
    """Elements of 16 bits, of all tensors together, in the part of a row that a program copies, at most."""
    warps: int
    ring: int = 3
    """Rows in shared memory."""
    programs: int = 1
    """Programs per multiprocessor."""
    where: Literal["global", "shared", "registers"] = "global"
    """See `PARAMETER_MEMORY`."""
    kept: bool = False
    """Keep a row in registers between the two passes of its sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """How the programs of a launch share rows."""

    mode: int
    vector: int
    """Elements per 16 bytes."""
    part: int
    """Columns per part."""
    chunks: int
    """Chunks per part; the last one may reach beyond the part."""
    chunk: int
    """Columns per chunk."""
    parts: int
    """Parts per row, and programs per group."""
    groups: int
    ring: int
    """Rows in shared memory."""
    where: int
    """Index into `PARAMETER_MEMORY`."""
    warps: int
    registers: int | None

    @property
    def form(self) -> tuple[int, int, int, int]:
        """The last constants of each kernel."""
        return self.mode, self.vector, self.chunks, self.chunk

    @property
    def padded(self) -> int:
        """Parts per row, rounded up to a power of 2."""
        return next_power_of_2(self.parts)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.parts * self.groups, 1, 1

    def words(self, unused: Tensor) -> Tensor:
        """Zeroed 64-bit words to publish sums by; a row of one part publishes nothing and gets `unused`."""
        if self.parts == 1:
            return unused
        size = HEADER_WORDS + self.groups * SLOTS * 2 * self.padded
        return grid_counters(2 * size, unused.device)  # counters have 32 bits


def plan_ring(
    rows: int,
    columns: int,
    config: RingConfig,
    copied: Sequence[tuple[Tensor, int]],
    written: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    *,
    shifts: bool = True,
) -> RingPlan | None:
    """How to share rows; None if these kernels do not support such rows, or cannot run.

    Args:
        copied: The tensors that go through shared memory, with their row strides.
        written: New, dense tensors.
        parameters: The weight and the bias.
        shifts: Whether the kernel takes SHIFTED rows, as kernels without sums over rows do.
    """
    tensors = [*(tensor for tensor, _ in copied), *written]
    if not runs_on(tensors[0].device):
        return None
    sizes = [tensor.element_size() for tensor in tensors]
    vector = 16 // min(sizes)
    aligned = all(_address(tensor) % 16 == 0 for tensor in tensors)
    even = columns % vector == 0 and all(stride % vector == 0 for _, stride in copied)
    # the last row is read to the end of its last 16 bytes, which must not be beyond the end of the tensor
    dense = len(set(sizes)) == 1 and all(stride == columns for _, stride in copied) and rows * columns % vector == 0
    if not aligned or not (even or (dense and shifts)):
        return None
    # a shift moves the end of a row
    width = columns if even else columns + vector - 1
    warps, programs, ring = config.warps, config.programs, config.ring
    chunk = 32 * warps * vector
    bytes_per_column = sum(tensor.element_size() for tensor, _ in copied)
    max_part = max(config.width * 2 // bytes_per_column // chunk, 1) * chunk
    # all equally wide, as memory traffic takes the time; and none ends before its last chunk, so that only that one
    # needs masks
    for parts in range(triton.cdiv(width, max_part), MAX_PARTS + 1):
        part = triton.cdiv(width, parts * vector) * vector
        chunks = triton.cdiv(part, chunk)
        if columns - (parts - 1) * part >= (chunks - 1) * chunk:
            break
    else:
        return None
    multiprocessors = processors(tensors[0].device)
    groups = _balanced_groups(programs * multiprocessors // parts, rows)
    room = _SHARED_BYTES // programs - _RESERVED_BYTES - _SCRATCH_BYTES - chunks * chunk * bytes_per_column * ring
    aligned = even and all(_address(tensor) % 16 == 0 for tensor in parameters)
    where = PARAMETER_MEMORY.index(config.where) if aligned else 0
    parameter_bytes = chunks * chunk * sum(tensor.element_size() for tensor in parameters)
    if PARAMETER_MEMORY[where] == "shared" and parameter_bytes > room:
        where = 0
    if parts > multiprocessors or room < 0 or rows < _MIN_TURNS * groups:
        return None
    return RingPlan(
        mode=SHIFTED if not even else FULL if columns == parts * chunks * chunk else ENDED,
        vector=vector,
        part=part,
        chunks=chunks,
        chunk=chunk,
        parts=parts,
        groups=groups,
        ring=ring,
        where=where,
        warps=warps,
        registers=min(65536 // (32 * warps * programs) // 8 * 8, 255),
    )


def _balanced_groups(max_groups: int, rows: int) -> int:
    """This many groups, or a few less if more of them then have a row in the last turn."""

    def row_slots(groups: int) -> int:
        return -(-rows // max(groups, 1)) * groups

    return min(range(max_groups, max_groups - max_groups // 20 - 1, -1), key=row_slots)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def ring_forward_candidates(size: int, *, weights: bool) -> list[RingConfig]:
    """Configurations worth measuring for rows of this many elements of 16 bits, with a weight or without."""
    if not _is_available() or size < MIN_ROW:
        return []
    wide, narrow = RingConfig(width=32768, warps=16), RingConfig(width=16384, warps=8, programs=2)
    configs = [wide, replace(wide, warps=8), replace(wide, warps=32), narrow]
    if not weights:
        return [*configs, replace(wide, kept=True)]
    deep = RingConfig(width=16384, warps=16, ring=6)
    configs.append(replace(deep, ring=4, where="shared"))
    return configs + [replace(config, where="registers") for config in (narrow, wide, deep)]


def ring_backward_candidates(size: int, *, sums: bool = False, added: bool = False) -> list[RingConfig]:
    """The same for gradients, with sums over rows or without, and of a norm after an addition."""
    if not _is_available() or size < MIN_ROW:
        return []
    wide = RingConfig(width=32768, warps=16)
    configs = [wide, RingConfig(width=16384, warps=8, programs=2)]
    if added:  # parts of three tensors are smaller than others
        configs += [replace(config, ring=4) for config in configs]
    if sums:
        return configs + [replace(config, where="shared") for config in configs]
    return [*configs, replace(wide, warps=8), replace(wide, warps=32)]


def whole_row_candidates(size: int, *, tensors: int, sums: int) -> list[RingConfig]:
    """The same for shorter rows, of which a program has all: its chunks need not be a power of 2, as those of tiles.

    Args:
        tensors: Those that are copied.
        sums: Those over rows, which stay in registers.
    """
    return whole_row_configs(size, tensors=tensors, sums=sums) if _is_available() else []


def whole_row_configs(size: int, *, tensors: int, sums: int) -> list[RingConfig]:
    """Configurations of which a multiprocessor has the registers, as observed with ptxas, and the shared memory."""
    configs = []
    for warps in (1, 2, 4, 8, 16):
        chunk = 32 * warps * 8
        chunks = triton.cdiv(size, chunk)
        registers = 48 + 8 * chunks * (1 + sums)
        for ring in (3, 4):
            row_bytes = 2 * chunks * chunk
            shared = row_bytes * (tensors * ring + 1) + _SCRATCH_BYTES + _RESERVED_BYTES
            programs = min(65536 // (32 * warps * -(-registers // 8) * 8), _SHARED_BYTES // shared)
            if 2 <= chunks <= 6 and registers < 256 and programs * warps >= 8:
                width = tensors * chunks * chunk
                configs.append(RingConfig(width=width, warps=warps, ring=ring, programs=programs, where="shared"))
    return configs


def _is_available() -> bool:
    """Whether the tuner can measure these kernels here."""
    return torch.cuda.is_available() and runs_on(torch.device("cuda", torch.cuda.current_device()))
