"""How long rows are shared on Hopper: parts of rows in ring buffers in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels._runtime.gluon import runs_on
from nearpeak.kernels._runtime.grid_counters import grid_counters
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.row_barrier import MAX_PARTS
from nearpeak.kernels._runtime.tuning import processors

FULL, ENDED, SHIFTED = range(3)
"""Rows that fill all parts; that end within one, at 16 bytes; that are dense, but begin and end anywhere."""
PARAMETER_MEMORY = ("global", "shared", "registers")
"""Where a part of the weight and the bias stays between two rows; in global memory, that is in a cache."""
SLOTS = 4
"""Of rows whose sums are told at a time: nobody tells of a row before all have read of the one four before it."""
MIN_ROW = 16384
"""Rows of so many times 16 bits, for which these kernels are worth a try."""
_SHARED_BYTES = 228 * 2**10
"""Of a multiprocessor, of which each program takes `_RESERVED_BYTES` more than it asks for."""
_RESERVED_BYTES = 1024
_SCRATCH_BYTES = 512
"""For sums over the threads of a program."""
_MIN_TURNS = 3
"""Rows of each group, so that the ring is worth filling."""
HEADER_WORDS = 16
"""The first counts tickets, and the middle one programs that are done, on a cache line of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """How rows are shared."""

    mode: int
    vector: int
    """Elements of 16 bytes."""
    part: int
    """Columns of a part."""
    chunks: int
    chunk: int
    """A part has so many chunks, of so many columns; not all of the last may be its own."""
    parts: int
    groups: int
    ring: int
    """Rows in shared memory."""
    where: int
    warps: int
    registers: int | None

    @property
    def form(self) -> tuple[int, int, int, int]:
        """The last constants of each kernel."""
        return self.mode, self.vector, self.chunks, self.chunk

    @property
    def padded(self) -> int:
        return next_power_of_2(self.parts)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.parts * self.groups, 1, 1

    def words(self, unused: Tensor) -> Tensor:
        """What programs tell each other by, all 0; a row of one part has nobody to tell, and takes any tensor."""
        if self.parts == 1:
            return unused
        size = HEADER_WORDS + self.groups * SLOTS * 2 * self.padded
        return grid_counters(2 * size, unused.device)  # of 32 bits, and a word has 64


def plan_ring(
    rows: int,
    columns: int,
    config: dict[str, Any],
    copied: Sequence[tuple[Tensor, int]],
    written: Sequence[Tensor],
    held: Sequence[Tensor] = (),
    *,
    shifts: bool = True,
) -> RingPlan | None:
    """How to share rows; None where these kernels are not for such rows, or cannot run.

    `copied` are the tensors that go through shared memory, with their strides, `written` new ones, dense, and `held`
    the weight and the bias. SHIFTED rows are for those that have no sums over rows.
    """
    tensors = [*(one for one, _ in copied), *written]
    if not runs_on(tensors[0].device):
        return None
    sizes = [one.element_size() for one in tensors]
    vector = 16 // min(sizes)
    aligned = all(_address(one) % 16 == 0 for one in tensors)
    even = columns % vector == 0 and all(stride % vector == 0 for _, stride in copied)
    # the last row is read to the end of its last 16 bytes, which must not be after that of the tensor
    dense = len(set(sizes)) == 1 and all(stride == columns for _, stride in copied) and rows * columns % vector == 0
    if not aligned or not (even or (dense and shifts)):
        return None
    # what a shift moves to the end
    width = columns if even else columns + vector - 1
    warps, programs, ring = config["warps"], config["programs"], config["ring"]
    chunk = 32 * warps * vector
    by_column = sum(one.element_size() for one, _ in copied)
    most = max(config["width"] * 2 // by_column // chunk, 1) * chunk
    # all as wide, as memory is what takes time; and none ends before its last chunk, so that others need no masks
    for parts in range(triton.cdiv(width, most), MAX_PARTS + 1):
        part = triton.cdiv(width, parts * vector) * vector
        chunks = triton.cdiv(part, chunk)
        if columns - (parts - 1) * part >= (chunks - 1) * chunk:
            break
    else:
        return None
    at_hand = processors(tensors[0].device)
    groups = _groups(programs * at_hand // parts, rows)
    room = _SHARED_BYTES // programs - _RESERVED_BYTES - _SCRATCH_BYTES - chunks * chunk * by_column * ring
    where = PARAMETER_MEMORY.index(config["where"]) if even and all(_address(one) % 16 == 0 for one in held) else 0
    if PARAMETER_MEMORY[where] == "shared" and chunks * chunk * sum(one.element_size() for one in held) > room:
        where = 0
    if parts > at_hand or room < 0 or rows < _MIN_TURNS * groups:
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


def _groups(most: int, rows: int) -> int:
    """So many, or a few less if then more of them have a row in the last turn."""

    def places(groups: int) -> int:
        return -(-rows // max(groups, 1)) * groups

    return min(range(most, most - most // 20 - 1, -1), key=places)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def ring_forward_candidates(size: int, *, weights: bool) -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of so many times 16 bits, with a weight or without."""
    if not _is_available() or size < MIN_ROW:
        return []
    found = [ring_config(32768, 16), ring_config(32768, 8), ring_config(32768, 32), ring_config(16384, 8, programs=2)]
    if weights:
        held = [ring_config(16384, 8, programs=2), ring_config(32768, 16), ring_config(16384, 16, ring=6)]
        return [*found, ring_config(16384, 16, ring=4, where="shared"), *(one | {"where": "registers"} for one in held)]
    return [*found, ring_config(32768, 16, kept=True)]


def ring_backward_candidates(size: int, *, sums: bool = False, added: bool = False) -> list[dict[str, Any]]:
    """The same for gradients, with sums over rows or without, and of a norm after an addition."""
    if not _is_available() or size < MIN_ROW:
        return []
    found = [ring_config(32768, 16), ring_config(16384, 8, programs=2)]
    if added:  # parts of three tensors are smaller than others
        found += [one | {"ring": 4} for one in found]
    if sums:
        return found + [one | {"where": "shared"} for one in found]
    return [*found, ring_config(32768, 8), ring_config(32768, 32)]


def ring_config(
    width: int, warps: int, *, ring: int = 3, programs: int = 1, where: str = "global", kept: bool = False
) -> dict[str, Any]:
    """Of all tensors, a program copies parts of a row of at most `width` times 16 bits; `programs` are by processor."""
    return {
        "variant": "parts", "width": width, "warps": warps, "ring": ring, "programs": programs, "where": where,
        "kept": kept,
    }  # fmt: skip


def _is_available() -> bool:
    """Whether a tuner is to try them."""
    return torch.cuda.is_available() and runs_on(torch.device("cuda", torch.cuda.current_device()))
