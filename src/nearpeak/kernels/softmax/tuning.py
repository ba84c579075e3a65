"""Launch configurations of softmax: from the table, by a heuristic, and the candidates of the tuner.

A row that fits is in registers (`TileConfig`). A longer one has parts, which are read twice (`SplitConfig`) or, on
Hopper, kept in shared memory (`RingConfig`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from nearpeak.kernels._runtime.gluon import runs_on
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.ring_buffer import RingConfig, ring_backward_candidates, ring_forward_candidates
from nearpeak.kernels._runtime.row_barrier import SplitConfig, adapt_to_rows, split_candidates
from nearpeak.kernels._runtime.tuning import from_row, processors, spread_rows, tuned, tuned_by_rows

_VECTOR_BYTES = 16
"""Bytes that a thread loads at once."""
_MAX_TILE = 32768
"""The longest row that is in registers if nothing was measured."""
_RING = RingConfig(width=32768, warps=8)
"""Of longer rows between measured lengths, as on both sides."""
_PACKED_ELEMENTS = 32
"""Of a thread: from so many on, it is worth to keep them as they were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Whole rows in the registers of a program."""

    variant: ClassVar[str] = "tile"
    rows: int
    """Rows per program."""
    warps: int
    packed: bool = False
    """Keep rows as the 16 bits that were read, and not as float32."""


Config = TileConfig | SplitConfig | RingConfig


def choose_config(kernel: str, rows: int, columns: int, x: Tensor, *, masked: bool, config: Config | None) -> Config:
    """The configuration given, measured or guessed, in this order, adapted to these rows."""
    backward, forced = kernel.endswith("backward"), config is not None
    if config is None:
        config = from_row(tuned_by_rows(kernel, columns, rows, x.device), TileConfig, SplitConfig, RingConfig)
        forced = config is not None
    if config is None:
        measured = from_row(tuned(kernel, columns, x.device), TileConfig, SplitConfig, RingConfig)
        if measured is None and columns > _MAX_TILE:
            measured = _RING
        config = heuristic(columns, backward=backward) if measured is None else adapt_to_rows(measured, rows)
    if isinstance(config, RingConfig) and not runs_on(x.device):
        return heuristic(columns, backward=backward)
    if not isinstance(config, TileConfig):
        return config if columns > 1 else heuristic(columns, backward=backward)
    narrow = x.element_size() == 2
    if columns > _longest_tile(narrow, masked, backward):
        return SplitConfig()
    # a row that does not fit as float32 is packed, whatever was measured for other rows
    packed = config.packed or columns > _longest_tile(False, masked, backward)
    if not forced:
        together, warps = spread_rows(config.rows, config.warps, next_power_of_2(columns), rows, processors(x.device))
        # threads of which each has a few elements have the registers for them
        packed = packed and together * next_power_of_2(columns) >= _PACKED_ELEMENTS * 32 * warps
        config = replace(config, rows=together, warps=warps)
    return replace(config, packed=narrow and not masked and packed)


def _longest_tile(narrow: bool, masked: bool, backward: bool) -> int:
    """The longest row that fits into registers, which hold two of them in a backward pass."""
    if backward:
        return 32768 if narrow else 16384
    return 65536 if narrow and not masked else 32768


def heuristic(columns: int, *, backward: bool = False) -> TileConfig | SplitConfig:
    if columns > _MAX_TILE:
        return SplitConfig()
    block = next_power_of_2(columns)
    elements = 1024 if backward else 2048  # of short rows together
    rows = max(min(elements // block, 256), 1)  # each row has an address
    warps = min(max(rows * block // (512 if backward else 1024), rows // 64, 1), 32)
    return TileConfig(rows=rows, warps=warps)


def candidates(columns: int, *, backward: bool = False) -> list[Config]:
    """Configurations worth measuring for rows of this many columns of 16 bits."""
    block = next_power_of_2(columns)
    configs: list[Config] = []
    if block <= _longest_tile(True, False, backward):
        # forward, a second conversion takes more registers than it saves, unless nothing else fits
        for packed in (False, True) if backward else (block > 32768,):
            for warps in (1, 2, 4, 8, 16, 32):
                for rows in (1, 2, 4, 8, 16, 32, 64):
                    per_thread = rows * block // (32 * warps)
                    registers = per_thread * (2 if backward else 1) // (2 if packed else 1)
                    fits = per_thread >= 8 and registers <= (96 if warps <= 16 else 40)  # some are left for the rest
                    if fits and (rows == 1 or rows * block <= 16384) and not (packed and per_thread < _PACKED_ELEMENTS):
                        configs.append(TileConfig(rows=rows, warps=warps, packed=packed))
    if columns >= 16384:
        configs += split_candidates(columns)
        configs += ring_backward_candidates(columns) if backward else ring_forward_candidates(columns, weights=False)
    return configs


def chunk_shape(config: SplitConfig, x: Tensor, *, bytewise: bool = False) -> tuple[int, int]:
    """The steps, and the columns of each, that a program loads at once, all of one row of `x`.

    With a boolean mask, `bytewise`, a thread reads 16 elements of it at once, and so of `x`: with fewer of them, the
    exchange between threads takes more registers than there are.
    """
    steps, vector = config.steps, _VECTOR_BYTES // x.element_size()
    if bytewise:
        steps, vector = max(steps * vector // _VECTOR_BYTES, 1), _VECTOR_BYTES
    return steps, vector * 32 * config.warps
