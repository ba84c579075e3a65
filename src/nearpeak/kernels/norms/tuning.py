"""Launch configurations of the norms: table keys, heuristics, and the candidates of the tuner."""

from __future__ import annotations

from typing import Any

from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.ring_buffer import ring_backward_candidates
from nearpeak.kernels._runtime.row_barrier import MAX_PARTS

MAX_BACKWARD_TILE = 16384
MAX_ROWS = 128
"""Of a program: each takes registers of its own for its address and its statistics."""
MIN_SHARED_TILE = 4096
SHARED_BYTES = 220 * 2**10
"""The shared memory of a multiprocessor, less a little for sums."""


def table_key(kernel: str, centered: bool, added: bool) -> str:
    """The name in the table of "norm_forward" or "norm_backward" of a LayerNorm, or of a norm after an addition."""
    return kernel + "_centered" * centered + "_added" * added


def registers_per_thread(warps: int, programs: int) -> int:
    """That a thread may have if so many programs are to run at a time on a multiprocessor, which has 65,536."""
    return min(2048 // (warps * programs) // 8 * 8, 255)


def backward_heuristic(size: int, *, centered: bool = False, added: bool = False) -> dict[str, Any]:
    """What to launch backward kernels with where nobody measured, for rows of so many times 16 bits."""
    block = next_power_of_2(size)
    if block <= MAX_BACKWARD_TILE and not (centered and block == MAX_BACKWARD_TILE):
        # by thread 32 elements; half as many with a second sum over rows, and in rows that need all threads
        elements = 16 if centered or block == MAX_BACKWARD_TILE else 32
        warps = min(max(block // (32 * elements), 4), 32)
        rows = min(max(elements * 32 * warps // block, 1), MAX_ROWS)
        stages = 3 if centered and rows == 1 else 1
        programs = max((24 if centered and rows == 1 else 16) // warps, 1)
        return {"variant": "tile", "rows": rows, "warps": warps, "stages": stages, "programs": programs}
    block, stages = (4096, 3) if centered else (8192, 1)
    return {
        "variant": "shared", "rows": 1, "block": block, "warps": 16, "stages": stages, "programs": 2, "ahead": True,
        "hints": True,
    }  # fmt: skip


def backward_candidates(size: int, *, centered: bool = False, added: bool = False) -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of so many times 16 bits; `programs` are by multiprocessor."""
    block = next_power_of_2(size)
    found: list[dict[str, Any]] = []
    if block <= MAX_BACKWARD_TILE:
        found += [
            {"variant": "tile", "rows": rows, "warps": warps, "stages": stages, "programs": programs}
            for warps, rows in _tiles(block)
            for stages in (1, 2, 3)
            for programs in _programs(rows * block, block, warps, stages, centered, added)
        ]
    found += [
        {
            "variant": "shared", "rows": 1, "block": width, "warps": warps, "stages": stages, "programs": programs,
            "ahead": ahead, "hints": hints, "batch": batch,
        }
        for width, warps, programs in _shapes(block, centered)
        for ahead, batch in _batches(block, width, programs)
        for stages in (1, 3)
        for hints in ((True, False) if ahead and batch > 1 and stages == 1 else (width < block,))
        if _fits(width, width, warps, programs, stages, centered, added)
    ]  # fmt: skip
    return found + ring_backward_candidates(size, sums=True, added=added)


def _shapes(block: int, centered: bool) -> list[tuple[int, int, int]]:
    """Columns, warps and programs of rows that are shared, or read twice by one program."""
    if block < MIN_SHARED_TILE:
        return []
    if block == MIN_SHARED_TILE:
        return [(block, 16, 2), (block, 8, 4)]
    found = [(8192, 32, 1), (8192, 16, 1) if centered else (8192, 16, 2)]
    return found if block > MAX_PARTS * 4096 else [*found, (4096, 16, 2)]


def _tiles(block: int) -> list[tuple[int, int]]:
    """Warps and rows of tiles: of 16 or 32 elements by thread, also 64 of rows that are not long."""
    if block >= 2048:
        most = 64 if block <= 4096 else 32
        return [(warps, 1) for warps in (2, 4, 8, 16, 32) if 16 <= block // (32 * warps) <= most]
    found = {(warps, elements * 32 * warps // block) for warps in (1, 2, 4) for elements in (16, 32)}
    return sorted({(warps, min(rows, MAX_ROWS)) for warps, rows in found if rows})


def _programs(elements: int, block: int, warps: int, stages: int, centered: bool, added: bool) -> list[int]:
    """As many as run at a time, and fewer, which leave fewer partial sums."""
    most = 32 // warps
    while most and not _fits(elements, block, warps, most, stages, centered, added):
        most -= 1
    fewer = {most // 2} if block < 2048 else {most - 1, most - 2} if stages == 1 else {most - 1}
    return sorted({programs for programs in {most, *fewer} if programs > 0 and (block >= 2048 or stages != 2)})


def _batches(block: int, width: int, programs: int) -> list[tuple[bool, int]]:
    """Whether to read ahead, and how many rows at a time, by what is to stay in the cache."""
    if block <= width:  # nobody waits: rows are read again at once, from the L1 cache if they are still there
        return [(False, 1), (False, 4)]
    row = 132 * programs * width * 4
    return [(False, 35 * 10**6 // row), (True, 9 * 10**6 // row), (True, 18 * 10**6 // row)]


def _fits(elements: int, block: int, warps: int, programs: int, stages: int, centered: bool, added: bool) -> bool:
    """Whether registers and shared memory of a multiprocessor last for so many programs, as ptxas was seen to do."""
    by_thread, tensors = elements // (32 * warps), 2 + added
    needed = by_thread * (1 + 1.25 * centered) + by_thread * (tensors + 1) / 2 + 12
    kept = (stages - 1) * 2 * (tensors * elements + block)  # of all tensors and of the weight, in 16 bits
    return needed <= registers_per_thread(warps, programs) and programs * kept <= SHARED_BYTES
