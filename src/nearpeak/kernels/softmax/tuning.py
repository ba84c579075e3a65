"""What to launch the kernels of softmax with, by the length of rows.

{"variant": "tile", "rows": 4, "warps": 4, "packed": False}
    So many whole rows in the registers of a program. Packed: as the 16 bits that were read, and not as float32.
{"variant": "split", "steps": 4, "warps": 16, "stages": 1, "hints": True, "kept": False, "part": 65536}
    Parts of a row, of so many columns or as `meeting.split` has it, a program for each, which reads its part twice. It
    loads 16 bytes by each thread in so many steps at once. With more than one stage, the next are loaded to shared
    memory meanwhile. With hints, the cache is asked to keep what was read first until it is read again. What is loaded
    first may be kept in registers instead.
{"variant": "parts", "width": 32768, "warps": 16, "ring": 3, "programs": 1, "where": "global", "kept": False}
    Parts of rows in shared memory, on Hopper: see `parts`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nearpeak.kernels._runtime.gluon import runs_on
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.ring_buffer import ring_backward_candidates, ring_forward_candidates
from nearpeak.kernels._runtime.row_barrier import adapt_to_rows, split_candidates
from nearpeak.kernels._runtime.tuning import tuned

Config = dict[str, Any]
_VECTOR_BYTES = 16
"""Bytes that a thread loads at once."""
_SPLIT: Config = {"variant": "split", "steps": 4, "warps": 16, "stages": 1, "hints": True, "kept": False}


def choose_config(kernel: str, rows: int, columns: int, x: Tensor, *, masked: bool, config: Config | None) -> Config:
    """The configuration given, measured or guessed, in that order, made to fit these rows."""
    backward = kernel.endswith("backward")
    config = config or adapt_to_rows(tuned(kernel, columns, x.device), rows) or heuristic(columns, backward=backward)
    if config["variant"] == "parts" and not runs_on(x.device):
        return heuristic(columns, backward=backward)
    if config["variant"] != "tile":
        return config if columns > 1 else heuristic(columns, backward=backward)
    narrow = x.element_size() == 2
    packs = narrow and not masked
    if columns > _longest_tile(narrow, masked, backward):
        return _SPLIT
    # what does not fit as float32 is packed, whatever was measured for other rows
    return {**config, "packed": packs and (config["packed"] or columns > _longest_tile(False, masked, backward))}


def _longest_tile(narrow: bool, masked: bool, backward: bool) -> int:
    """The longest row that fits into registers; a backward pass has two of them there."""
    if backward:
        return 32768 if narrow else 16384
    return 65536 if narrow and not masked else 32768


def heuristic(columns: int, *, backward: bool = False) -> Config:
    """A good guess for rows of so many columns."""
    if columns > 32768:
        return _SPLIT
    block = next_power_of_2(columns)
    held = 1024 if backward else 2048  # elements of short rows together
    rows = max(min(held // block, 256), 1)  # each row has an address
    warps = min(max(rows * block // (512 if backward else 1024), rows // 64, 1), 32)
    return {"variant": "tile", "rows": rows, "warps": warps, "packed": False}


def candidates(columns: int, *, backward: bool = False) -> list[Config]:
    """The configurations worth measuring for rows of so many columns of 16 bits."""
    block = next_power_of_2(columns)
    found: list[Config] = []
    if block <= _longest_tile(True, False, backward):
        # forward, conversion again takes more registers than it saves, except where nothing else fits
        for packed in (False, True) if backward else (block > 32768,):
            for warps in (1, 2, 4, 8, 16, 32):
                for rows in (1, 2, 4, 8, 16, 32, 64):
                    thread = rows * block // (32 * warps)  # elements of a thread
                    held = thread * (2 if backward else 1) // (2 if packed else 1)
                    fits = thread >= 8 and held <= (96 if warps <= 16 else 40)  # and some registers for the rest
                    if fits and (rows == 1 or rows * block <= 16384) and not (packed and thread < 32):
                        found.append({"variant": "tile", "rows": rows, "warps": warps, "packed": packed})
    if columns >= 16384:
        found += split_candidates(columns)
        found += ring_backward_candidates(columns) if backward else ring_forward_candidates(columns, weights=False)
    return found


def chunk_shape(config: Config, x: Tensor, *, bytewise: bool = False) -> tuple[int, int]:
    """The steps, and the columns of each, that a program of `split` loads at once, all of one row of `x`.

    With a boolean mask, `bytewise`, a thread reads 16 elements of it at once, and so of `x`: with fewer of them, the
    exchange between threads takes more registers than there are.
    """
    steps, thread = config["steps"], _VECTOR_BYTES // x.element_size()
    if bytewise:
        steps, thread = max(steps * thread // _VECTOR_BYTES, 1), _VECTOR_BYTES
    return steps, thread * 32 * config["warps"]
