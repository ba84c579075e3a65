"""Launch configurations of the norms: from the table, by heuristics, and the candidates of the tuner.

Sizes are row lengths in elements of 16 bits. A LayerNorm and a norm after an addition keep more in registers than an
RMSNorm, so that each has rows of its own in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from nearpeak.kernels._runtime import tuning
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.ring_buffer import (
    RingConfig,
    ring_backward_candidates,
    ring_forward_candidates,
    whole_row_candidates,
)
from nearpeak.kernels._runtime.row_barrier import MAX_PARTS, SplitConfig, adapt_to_rows, split_candidates
from nearpeak.kernels._runtime.tuning import from_row, processors, spread_rows, tuned, tuned_by_rows

MAX_FORWARD_TILE = 32768
"""A longer row does not fit into the registers of 32 warps."""
MAX_BACKWARD_TILE = 16384
MAX_FEW_TILE = 8192
"""A longer row, of a few that are read by more threads, does not fit with the sums of a LayerNorm."""
MAX_ROWS = 128
"""Rows per program, each of which takes registers for its address and its statistics."""
MIN_GROUP_ROW = 4096
_EARLY_WAVES = 4
"""Programs of a multiprocessor up to which all start at once, and none finds the weight in a cache."""
_EARLY_ELEMENTS = 16
"""Of 16 bits, of a thread: up to so many leave registers for weight and bias too."""
FEW = "_few"
"""After the name of a kernel in the table: its configurations for few rows."""
_LEAST_SPAN = 16
"""Columns of a sum over rows, in a program: 32 bytes, which memory reads at once, in 16 bits."""
_WAVES = 4
"""Full ones of which a launch must have so many for a configuration that was measured with many rows."""
_RING = RingConfig(width=16384, warps=8, programs=2, where="shared")
_SHARED_BYTES = 220 * 2**10
"""The shared memory of a multiprocessor, less a little for reductions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTileConfig:
    """Whole rows in the registers of a program."""

    variant: ClassVar[str] = "tile"
    rows: int
    """Rows per program."""
    warps: int
    programs: int | None = None
    """Programs per multiprocessor, to which registers are limited; None sets no limit."""
    packed: bool = False
    """Keep rows as the 16 bits that were read, and not as float32, so that more programs run at a time."""
    early: bool | None = None
    """Read weight and bias together with the rows, and not after their sums; None: see `reads_early`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTileConfig:
    """Whole rows in registers. A fixed number of programs goes over all rows."""

    variant: ClassVar[str] = "tile"
    rows: int
    """Rows per program and iteration."""
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Rows shared by a group of programs, which read them twice, in batches."""

    variant: ClassVar[str] = "shared"
    rows: int = 1
    """Rows per program and iteration."""
    block: int
    """Columns per program."""
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor."""
    ahead: bool
    """Read the next batch before waiting for this one."""
    hints: bool
    """Ask the cache to keep a batch until it is read again."""
    batch: int | None = None
    """Rows between two barriers; None: as many as fit into the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartConfig:
    """A program for each row, and programs of as many threads that sum over all rows."""

    variant: ClassVar[str] = "apart"
    warps: int
    elements: int
    """Of each thread of a program that sums, at a time."""


ForwardConfig = ForwardTileConfig | SplitConfig | RingConfig
BackwardConfig = BackwardTileConfig | GroupConfig | RingConfig | ApartConfig


def table_key(kernel: str, centered: bool, added: bool) -> str:
    """The table's name of "norm_forward" or "norm_backward" for a LayerNorm, or for a norm after an addition."""
    return kernel + "_centered" * centered + "_added" * added


def registers_per_thread(warps: int, programs: int) -> int:
    """The registers of a thread if this many programs run at a time on a multiprocessor, which has 65,536."""
    return min(2048 // (warps * programs) // 8 * 8, 255)


def forward_config(size: int, rows: int, device: torch.device, *, centered: bool, added: bool) -> ForwardConfig:
    """The measured configuration, if there are as many rows as it was measured with, or the heuristic."""
    key = table_key("norm_forward", centered, added)
    at_rows = from_row(tuned_by_rows(key, size, rows, device), ForwardTileConfig, SplitConfig, RingConfig)
    if at_rows is not None:
        return at_rows
    measured = from_row(tuned(key, size, device), ForwardTileConfig, SplitConfig, RingConfig)
    if measured is None or (isinstance(measured, ForwardTileConfig) and not _fills_gpu(measured, rows, device)):
        return forward_heuristic(size, rows, processors(device))
    return adapt_to_rows(measured, rows)


def _fills_gpu(config: ForwardTileConfig, rows: int, device: torch.device) -> bool:
    """Whether the programs of a launch come in so many waves that the last one, which is not full, hardly matters."""
    at_a_time = processors(device) * tuning.BUSY_WARPS // config.warps
    return rows >= config.rows * at_a_time * _WAVES


def forward_heuristic(size: int, rows: int, processors: int) -> ForwardTileConfig | SplitConfig:
    """32 elements per thread, in 4 loads of 16 bytes; fewer of a few rows, so that all multiprocessors are busy."""
    block = next_power_of_2(size)
    if block > MAX_FORWARD_TILE:
        return SplitConfig()
    warps = min(max(block // 1024, 4), 32)
    together = min(max(32 * 32 * warps // block, 1), MAX_ROWS)
    together, warps = spread_rows(together, warps, block, rows, processors)
    return ForwardTileConfig(rows=together, warps=warps, programs=2 if _fills_half(warps, block) else None)


def reads_early(config: ForwardTileConfig, block: int, rows: int, processors: int) -> bool:
    """Whether a program reads weight and bias together with its rows, and not after their sums.

    The later read costs each program its latency, the earlier one registers: if a thread has few elements, or if there
    are so few programs that registers do not matter.
    """
    if config.early is not None:
        return config.early
    few_elements = config.rows * block <= _EARLY_ELEMENTS * 32 * config.warps
    return few_elements or rows <= _EARLY_WAVES * config.rows * processors


def _fills_half(warps: int, block: int) -> bool:
    """Whether a row takes half of the registers, where the compiler may take a few more than half."""
    return warps == 16 and block == MAX_FORWARD_TILE // 2


def forward_candidates(size: int) -> list[ForwardConfig]:
    """Configurations worth measuring."""
    block = next_power_of_2(size)
    tiles: list[ForwardTileConfig] = []
    if block <= MAX_FORWARD_TILE:
        for warps in (1, 2, 4, 8, 16, 32):
            for elements in (8, 16, 32, 64):  # per thread
                rows = min(elements * 32 * warps // block, MAX_ROWS)
                if rows and elements * warps <= 1024 and (rows > 1 or elements * 32 * warps == block):
                    config = ForwardTileConfig(rows=rows, warps=warps)
                    tiles += [config] if config not in tiles else []
        single = [config for config in tiles if config.rows == 1]
        tiles += [replace(config, programs=2) for config in single if _fills_half(config.warps, block)]
        if block >= 4096:
            tiles += [replace(config, packed=True) for config in tiles if config.rows == 1]
    if block < MAX_FORWARD_TILE // 2:
        return [*tiles]
    return [*tiles, *split_candidates(size), *ring_forward_candidates(size, weights=True)]


def backward_config(size: int, rows: int, device: torch.device, *, centered: bool, added: bool) -> BackwardConfig:
    """The measured configuration, or the heuristic; few rows have their own of both.

    Between measured lengths, rows that do not fit into registers are in rings, as on both sides.
    """
    few = is_few(size, rows, processors(device))
    key = table_key("norm_backward", centered, added)
    row = tuned_by_rows(key, size, rows, device) or tuned(key + FEW * few, size, device)
    measured = from_row(row, BackwardTileConfig, GroupConfig, RingConfig, ApartConfig)
    if measured is not None:
        return measured
    if few:
        return few_backward_heuristic(size)
    return _RING if next_power_of_2(size) > MAX_BACKWARD_TILE else backward_heuristic(size, centered=centered)


def is_few(size: int, rows: int, processors: int) -> bool:
    """Whether a program for each row is all that there is to do at a time: then its latency counts, and no rate."""
    return rows <= 2 * processors and next_power_of_2(size) <= MAX_FEW_TILE


def few_backward_heuristic(size: int) -> ApartConfig:
    """As many threads as have two loads of 16 bytes of a row."""
    return ApartConfig(warps=min(max(next_power_of_2(size) // 512, 4), 16), elements=16)


def few_backward_candidates(size: int) -> list[BackwardTileConfig | ApartConfig]:
    """Configurations worth measuring for few rows: 4 to 32 elements of a row per thread."""
    block = next_power_of_2(size)
    tiles = [_one_row(warps) for warps in (2, 4, 8, 16) if 256 * warps <= block <= 1024 * warps]
    apart = [
        ApartConfig(warps=warps, elements=elements)
        for warps in (4, 8, 16)
        for elements in (8, 16, 32)
        if 64 * warps <= block <= 1024 * warps
    ]
    return [*tiles, *apart]


def column_tile(config: ApartConfig, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of a program that sums: few columns, so that most rows are read at once."""
    tile = 32 * config.warps * config.elements
    height = min(next_power_of_2(rows), tile // _LEAST_SPAN)
    return height, min(tile // height, max(next_power_of_2(columns), _LEAST_SPAN))


def _one_row(warps: int) -> BackwardTileConfig:
    return BackwardTileConfig(rows=1, warps=warps, stages=1, programs=2 if warps <= 8 else 1)


def backward_heuristic(size: int, *, centered: bool = False) -> BackwardTileConfig | GroupConfig:
    block = next_power_of_2(size)
    if block > MAX_BACKWARD_TILE or (centered and block == MAX_BACKWARD_TILE):
        width, stages = (4096, 3) if centered else (8192, 1)
        return GroupConfig(block=width, warps=16, stages=stages, programs=2, ahead=True, hints=True)
    # 32 elements per thread; half as many with a second sum over rows, in rows that need all threads, and in several
    # rows that do not fill their block: their masks take registers
    masked = size < block
    elements = 16 if centered or block == MAX_BACKWARD_TILE or (masked and block <= 2048) else 32
    warps = min(max(block // (32 * elements), 4), 32)
    rows = min(max(elements * 32 * warps // block, 1), MAX_ROWS)
    # the next rows on their way to shared memory, where a thread has too few elements in flight: 1.4 to 3 times as fast
    # for rows of 192, in all shapes of tiles
    stages = 3 if (centered and rows == 1) or (masked and block <= 2048) else 1
    programs = max((24 if centered and rows == 1 and not masked else 16) // warps, 1)
    return BackwardTileConfig(rows=rows, warps=warps, stages=stages, programs=programs)


def backward_candidates(size: int, *, centered: bool = False, added: bool = False) -> list[BackwardConfig]:
    """Configurations worth measuring."""
    block = next_power_of_2(size)
    configs: list[BackwardConfig] = []
    if block <= MAX_BACKWARD_TILE:
        configs += [
            BackwardTileConfig(rows=rows, warps=warps, stages=stages, programs=programs)
            for warps, rows in _tile_shapes(block)
            for stages in (1, 2, 3)
            for programs in _tile_programs(rows * block, block, warps, stages, centered, added)
        ]
    configs += [
        GroupConfig(
            block=width, warps=warps, stages=stages, programs=programs, ahead=ahead, hints=hints, batch=batch
        )
        for width, warps, programs in _group_shapes(block, centered)
        for ahead, batch in _group_batches(block, width, programs)
        for stages in (1, 3)
        for hints in ((True, False) if ahead and batch > 1 and stages == 1 else (width < block,))
        if _fits(width, width, warps, programs, stages, centered, added)
    ]  # fmt: skip
    if 1024 < size <= block * 7 // 8 < MAX_BACKWARD_TILE:
        configs += whole_row_candidates(size, tensors=2 + added, sums=1 + centered)
    return [*configs, *ring_backward_candidates(size, sums=True, added=added)]


def _group_shapes(block: int, centered: bool) -> list[tuple[int, int, int]]:
    """Columns and warps of a program, and programs per multiprocessor."""
    if block < MIN_GROUP_ROW:
        return []
    if block == MIN_GROUP_ROW:
        return [(block, 16, 2), (block, 8, 4)]
    shapes = [(8192, 32, 1), (8192, 16, 1) if centered else (8192, 16, 2)]
    return shapes if block > MAX_PARTS * 4096 else [*shapes, (4096, 16, 2)]


def _tile_shapes(block: int) -> list[tuple[int, int]]:
    """Warps and rows of tiles with 16 or 32 elements per thread; also 64 where rows are not long."""
    if block >= 2048:
        max_elements = 64 if block <= 4096 else 32
        return [(warps, 1) for warps in (2, 4, 8, 16, 32) if 16 <= block // (32 * warps) <= max_elements]
    shapes = {(warps, elements * 32 * warps // block) for warps in (1, 2, 4) for elements in (16, 32)}
    return sorted({(warps, min(rows, MAX_ROWS)) for warps, rows in shapes if rows})


def _tile_programs(elements: int, block: int, warps: int, stages: int, centered: bool, added: bool) -> list[int]:
    """As many programs as run at a time, and fewer, which leave fewer partial sums."""
    programs = 32 // warps
    while programs and not _fits(elements, block, warps, programs, stages, centered, added):
        programs -= 1
    fewer = {programs // 2} if block < 2048 else {programs - 1, programs - 2} if stages == 1 else {programs - 1}
    return sorted({number for number in {programs, *fewer} if number > 0 and (block >= 2048 or stages != 2)})


def _group_batches(block: int, width: int, programs: int) -> list[tuple[bool, int]]:
    """Whether to read ahead, and rows per batch, by the bytes that are to stay in the cache."""
    if block <= width:  # nobody waits: rows are read again at once, from the L1 cache if they are still there
        return [(False, 1), (False, 4)]
    row = 132 * programs * width * 4
    return [(False, 35 * 10**6 // row), (True, 9 * 10**6 // row), (True, 18 * 10**6 // row)]


def _fits(elements: int, block: int, warps: int, programs: int, stages: int, centered: bool, added: bool) -> bool:
    """Whether a multiprocessor has the registers and shared memory for this many programs, as observed with ptxas."""
    per_thread, tensors = elements // (32 * warps), 2 + added
    registers = per_thread * (1 + 1.25 * centered) + per_thread * (tensors + 1) / 2 + 12
    buffered = (stages - 1) * 2 * (tensors * elements + block)  # bytes of all tensors and of the weight, in 16 bits
    return registers <= registers_per_thread(warps, programs) and programs * buffered <= _SHARED_BYTES
