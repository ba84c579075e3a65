"""Launches `decode_attention`: which kernel, in how many parts, and with which configuration.

Where there are fewer heads and sequences than processors, programs share the keys of a sequence. See `decode_parts`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels.configs import processors, tuned
from nearpeak.kernels.jit.decode_eight import paired
from nearpeak.kernels.jit.decode_group import decode_kernel
from nearpeak.kernels.jit.decode_row import decode_row_kernel
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.rows import common_width
from nearpeak.kernels.jit.tickets import tickets

MOST_SPLITS = 512
_LEAST_KEYS = 256
"""Of a part, at the least, where a sequence is as long as it can be."""
_FULL = 0.95
"""The share of the places for programs on all processors that is to be taken."""
_ROUNDS = range(4, 9)
"""How many times as many programs as run at a time keep processors busy to the end, where they are more than that."""
_MOST_ROWS = 32
"""Of a tile, unless `rows` of a configuration says otherwise. Further queries read the keys again, from the cache. With
64 rows Triton takes the asynchronous matrix instructions of Hopper, for which Triton 3.6 is known to forget to wait."""
_TOGETHER = 2048
"""Numbers of parts that a warp loads at a time, to add them up: 64 of each thread."""


def forward(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the logarithms of the sums of exponentials. Copies nothing, whatever the strides.

    A negative `window` and a softcap of 0 stand for none. With `splits` in `config` there are as many parts.
    """
    batch, heads, new, dim = query.shape
    value_dim = value_cache.shape[-1]
    result = torch.empty((batch, heads, new, value_dim), dtype=query.dtype, device=query.device)
    logs = torch.empty((batch, heads, new), dtype=torch.float32, device=query.device)
    if pages is None:
        (key_heads, capacity), page = key_cache.shape[1:3], 0
        outer, head_dim, token_dim = 0, 1, 2
    else:
        page, key_heads = key_cache.shape[1:3]
        outer, head_dim, token_dim = 0, 2, 1
        capacity = pages.shape[1] * page
    group = heads // max(key_heads, 1)
    if not batch * heads * new:
        return result, logs
    in_group, size, eight = group * new, key_cache.element_size(), key_cache.element_size() == 1
    narrow = query.dtype != torch.float32 and (eight or key_cache.dtype == query.dtype)
    # numbers of 8 bits take less to be made numbers of 16, and to be multiplied by matrix units, than to be made of 32
    alone = in_group == 1 and not (eight and narrow)
    config = config or _tuned(alone, page > 0, dim * size, query.device)
    config = config or heuristic(dim, value_dim, size, alone, in_group > 16)
    block, warps, tile = config["block"], config["warps"], 1
    pairs = paired(key_cache, value_cache) if eight and narrow else None
    if not alone and not narrow:
        # products in float32 are not for matrix units, and threads have no registers for larger ones
        block, warps, tile = 16, 8, 16
    elif not alone:
        tile = max(16, min(next_power_of_2(in_group), config.get("rows", _MOST_ROWS)))
        if eight and pairs is None:  # bytes one by one take registers
            block = min(block, 32)
    key_cache, value_cache, of_pairs = pairs or (key_cache, value_cache, None)
    dim_block, value_block = (max(16 if pairs is None else 32, next_power_of_2(one)) for one in (dim, value_dim))
    held = min(next_power_of_2(in_group), tile)
    row_blocks = triton.cdiv(in_group, tile)
    programs = batch * key_heads * row_blocks
    places = config["programs"] * processors(query.device)
    splits = config.get("splits") or _splits(programs, places, capacity // max(_LEAST_KEYS, block))
    together = max(1, min(next_power_of_2(splits), _TOGETHER * warps // (held * value_block)))
    parts, statistics, counted = logs, logs, lengths
    if splits > 1:
        parts = torch.empty((programs, splits, held, value_block), dtype=torch.float32, device=query.device)
        statistics = torch.empty((programs, splits, 2, held), dtype=torch.float32, device=query.device)
        counted = tickets(programs, query.device)
    caches = (key_cache, value_cache)
    strides = [cache.stride(dimension) for cache in caches for dimension in (outer, head_dim)]
    steps = [
        (cache.stride(outer) if page else 0, cache.stride(token_dim), cache.stride(3)) for cache in caches
    ]  # fmt: skip
    options = sinks is not None, key_scales is not None, value_scales is not None
    scale_strides = [0 if one is None else one.stride(0) for one in (sinks, key_scales, value_scales)]
    launch(
        decode_row_kernel if alone else decode_kernel, (programs, splits, 1),
        query, *caches, lengths, lengths if pages is None else pages,
        *(logs if one is None else one for one in (sinks, key_scales, value_scales)), result, logs, parts, statistics,
        counted, scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
        *query.stride(), *strides, lengths.stride(0), 0 if pages is None else pages.stride(0), *scale_strides,
        group, new, dim, value_dim, page, *steps[0], *steps[1], window >= 0, softcap > 0.0, *options, splits > 1,
        of_pairs, common_width(*strides), tile, held, block, dim_block, value_block, together, config["stages"],
        warps=warps, stages=config["stages"], registers=_registers(warps, config["programs"]) if narrow else None,
    )  # fmt: skip
    return result, logs


def _registers(warps: int, programs: int) -> int | None:
    """What a thread may have, so that as many programs run at a time on a processor as parts were counted for."""
    most = 65536 // (32 * warps * programs) // 8 * 8
    return most if most < 255 else None


def _tuned(alone: bool, paged: bool, size: int, device: torch.device) -> dict[str, Any] | None:
    """What was measured for keys of so many bytes."""
    if alone:
        return tuned("decode_row_paged", size, device) if paged else tuned("decode_row", size, device)
    return tuned("decode_paged", size, device) if paged else tuned("decode", size, device)


@functools.lru_cache(maxsize=4096)
def _splits(programs: int, places: int, most: int) -> int:
    """How many parts the keys of a sequence have, where so many programs run at a time in all `places`.

    So many that all run at the same time, and no place is empty. Where these are too unlike numbers for that, as few as
    take several rounds, the last of them almost full. From what the host knows: the lengths are on the device, and a
    CUDA graph is for all of them.
    """
    most = max(1, min(most, MOST_SPLITS))
    once = min(places // programs, most)
    if once == most or once * programs >= _FULL * places:
        return once
    found, best = max(once, 1), 0.0
    for parts in range(1, most + 1):
        rounds = triton.cdiv(programs * parts, places)
        taken = programs * parts / (rounds * places)
        if rounds in _ROUNDS and taken > best:
            found, best = parts, taken
        if rounds >= _ROUNDS.stop or best >= _FULL:
            break
    return found


def heuristic(dim: int, value_dim: int, element_bytes: int, alone: bool, many: bool) -> dict[str, Any]:
    """What to launch with where nobody measured: blocks of up to 32 KiB of keys and as much of values, of which a
    processor has three to six, some in use and the others on their way. One query sees a head of keys `alone`, or
    `many` do."""
    width = max(16, next_power_of_2(max(dim, value_dim)))
    whole = element_bytes > 1 and not alone and not many
    # sums of a query alone are as many as a block of values has numbers, in registers
    block = max(16, min(128, (32768 if whole else 16384) // (width * element_bytes), 8192 // width if alone else 128))
    stages, programs = 4, 2
    if whole:  # one program, so that there are few parts to put together
        stages, programs = 3, 1
    elif many:  # and their sums take memory too
        stages = 3
    elif element_bytes == 1 and not alone:  # more instructions by byte, and so more warps to hide how long these take
        stages, programs = 3, 3
    return {"block": block, "warps": 8 if alone else 4, "stages": stages, "programs": programs}


def candidates(size: int, alone: bool = False, paged: bool = False) -> list[dict[str, Any]]:
    """Configurations worth measuring for keys of so many bytes."""
    found: list[dict[str, Any]] = []
    for block in (16, 32, 64, 128):
        for warps in (2, 4, 8):
            for stages, programs in ((3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (6, 1), (3, 4)):
                moving = 2 * block * size * (stages - 1) * programs
                fits = 96 * 1024 <= moving <= 200 * 1024 and 8192 <= block * size <= 32768
                if fits and (warps == 4 or moving >= 160 * 1024) and (alone or warps <= 4):
                    found.append({"block": block, "warps": warps, "stages": stages, "programs": programs})
    return found
