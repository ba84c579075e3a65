"""Configurations of the attention kernels: the measured ones, the heuristic, and the candidates for the tuner.

On Hopper, only configurations with reproducible results may be chosen: matrix products of eight warps in Triton 3.6 are
not all deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nearpeak.kernels._runtime.tuning import from_row, shared_bytes, tuned

_FLOAT32_BYTES = 4
"""Products of float32 do not use tensor cores, and their tiles take twice the memory."""
_TUNED_SHARED_BYTES = 227 * 1024
"""Shared memory of the GPU of the table, whose entries may use all of it. Desktop GPUs have 99 KB."""
_MAX_PERSISTENT_QUERIES = 8192
"""Causal tiles of longer sequences differ so much in work that the hardware scheduler balances them better."""
_FEW_BLOCKS = 4
"""Blocks of keys of a tile with which products and exponentials hardly overlap."""
_MAX_QUERIES_OF_ONE_SUM = 4096
MAX_SUMS = 2
"""Partial sums of each query gradient."""
_LEAST_ALTERNATING_DIM = 128
_FEWEST_HEADS_TOGETHER, _MOST_HEADS_TOGETHER = 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How a portable kernel is launched."""

    queries: int
    """Queries of a tile of scores."""
    keys: int
    """Keys of a tile of scores."""
    warps: int
    stages: int
    """Stages of the software pipeline: tiles in flight."""


def tile_config(
    kernel: str, causal: bool, widest: int, itemsize: int, plain: bool, dropout: bool, device: torch.device
) -> TileConfig:
    """The configuration of a portable kernel for heads of this size, rounded up to a power of 2.

    The table was measured with plain scores of 16 bits and no dropout; others need more registers.
    """
    config = None
    if plain and not dropout and itemsize != _FLOAT32_BYTES and shared_bytes(device) >= _TUNED_SHARED_BYTES:
        config = from_row(tuned(tile_table_key(kernel, causal), widest, device), TileConfig)
    return config or heuristic(kernel, widest, itemsize, plain)


def tile_table_key(kernel: str, causal: bool) -> str:
    """The name of a portable kernel in tables, where its size is that of heads."""
    return kernel + ("_causal" if causal else "")


def heuristic(kernel: str, widest: int, itemsize: int, plain: bool) -> TileConfig:
    """A configuration for sizes without a measurement. All fit into 99 KB of shared memory."""
    if kernel == "attention_forward":
        if itemsize == _FLOAT32_BYTES:
            return TileConfig(queries=32, keys=16, warps=4, stages=1)
        if widest <= 64:
            return TileConfig(queries=128 if plain else 64, keys=64, warps=4, stages=3 if plain else 2)
        if widest <= 128:
            return TileConfig(queries=64, keys=64 if plain else 32, warps=4, stages=2)
        return TileConfig(queries=64, keys=32, warps=4, stages=1)
    if kernel == "attention_keys":
        if itemsize == _FLOAT32_BYTES:
            return TileConfig(queries=16, keys=32, warps=4, stages=1)
        if widest <= 64:
            return TileConfig(queries=64, keys=64, warps=4, stages=2)
        if widest <= 128:
            return TileConfig(queries=16, keys=64, warps=4, stages=2)
        return TileConfig(queries=16, keys=64, warps=8, stages=2)
    if itemsize == _FLOAT32_BYTES:
        return TileConfig(queries=32, keys=16, warps=4, stages=1)
    if widest <= 64:
        return TileConfig(queries=64, keys=64, warps=4, stages=3)
    if widest <= 128:
        return TileConfig(queries=64, keys=32, warps=4, stages=3)
    return TileConfig(queries=64, keys=16, warps=4, stages=1)


_TILES = {
    "attention_forward": ((128, 64), (128, 128), (64, 64), (64, 128)),
    "attention_keys": ((64, 128), (32, 128), (64, 64), (128, 128), (32, 64)),
    "attention_queries": ((128, 64), (128, 128), (64, 64), (128, 32), (64, 32)),
}
"""Queries and keys of the tiles that are worth measuring. A kernel accumulates over one of both."""
_MAX_TILE = {64: 128 * 128, 128: 128 * 128, 256: 64 * 64}


def candidates(kernel: str, widest: int) -> list[TileConfig]:
    """Configurations worth measuring, for 16 bits: 64 accumulator rows for four warps, or 128 of few columns."""

    def enough_warps(queries: int, keys: int) -> int:
        return (keys if kernel == "attention_keys" else queries) // 16

    return [
        TileConfig(queries=queries, keys=keys, warps=warps, stages=stages)
        for queries, keys in _TILES[kernel]
        for warps in (4, 8)
        for stages in (2, 3)
        if queries * keys <= _MAX_TILE[max(widest, 64)]
        and (warps == enough_warps(queries, keys) or (widest <= 64 and queries != keys))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Config:
    """How the forward kernel for Hopper distributes its tiles."""

    consumers: int
    """Warpgroups that compute, each with 64 queries."""
    persistent: bool
    """Whether programs loop over tiles."""
    together: int
    """Heads whose tiles are processed together, few enough for their keys and values to stay in the L2 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Tiles:
    """The tiles of the forward kernel for Hopper in shared memory, of which there are 227 KiB."""

    keys: int
    """Keys of a block. Its scores and weights share the registers with the results."""
    key_stages: int
    """Blocks of keys in the ring buffer."""
    value_stages: int
    """Blocks of values in the ring buffer, at least 2: a block that only later queries see is waited for before the
    last one is free."""
    stored: int
    """Columns of the result that are stored at a time."""


_TILE_DIMS = (64, 80, 96, 128, 192, 256)
"""The columns that tiles have: powers of 2, and sums of two."""
_SM90_TILES = {
    (64, 64): [
        Sm90Tiles(keys=128, key_stages=3, value_stages=3, stored=64),
        Sm90Tiles(keys=64, key_stages=4, value_stages=4, stored=64),
    ],
    (80, 80): [
        Sm90Tiles(keys=128, key_stages=2, value_stages=2, stored=64),
        Sm90Tiles(keys=128, key_stages=3, value_stages=3, stored=64),
    ],
    (96, 96): [
        Sm90Tiles(keys=128, key_stages=2, value_stages=2, stored=64),
        Sm90Tiles(keys=128, key_stages=3, value_stages=3, stored=64),
    ],
    (128, 128): [
        Sm90Tiles(keys=128, key_stages=2, value_stages=2, stored=128),
        Sm90Tiles(keys=64, key_stages=3, value_stages=3, stored=128),
    ],
    (192, 128): [
        Sm90Tiles(keys=128, key_stages=2, value_stages=2, stored=64),
        Sm90Tiles(keys=64, key_stages=3, value_stages=3, stored=64),
    ],
    (192, 192): [
        Sm90Tiles(keys=64, key_stages=2, value_stages=2, stored=64),
        Sm90Tiles(keys=64, key_stages=3, value_stages=3, stored=64),
    ],
    (256, 256): [
        Sm90Tiles(keys=64, key_stages=2, value_stages=2, stored=64),
        Sm90Tiles(keys=64, key_stages=2, value_stages=2, stored=128),
    ],
}
"""By the columns of tiles of keys and of values, the default first; others are worth measuring."""


FP8_DIMS = (64, 128)
_SM90_FP8_TILES = [
    Sm90Tiles(keys=128, key_stages=2, value_stages=2, stored=64),
    Sm90Tiles(keys=128, key_stages=3, value_stages=3, stored=64),
]
"""Of operands in 8 bits, the default first; others are worth measuring."""


def sm90_fp8_tiles(dim: int) -> Sm90Tiles:
    """The tiles of the forward kernel for Hopper with operands in 8 bits."""
    return sm90_fp8_tile_candidates(dim)[0]


def sm90_fp8_tile_candidates(dim: int) -> list[Sm90Tiles]:
    """Tiles worth measuring."""
    return _SM90_FP8_TILES


def tile_dim(dim: int) -> int:
    """The columns of a tile for heads of this size. Those that are not in the head are 0."""
    return next(columns for columns in _TILE_DIMS if dim <= columns)


def sm90_tiles(dim: int, value_dim: int, left: int = -1) -> Sm90Tiles:
    """The tiles of the forward kernel for Hopper, for tiles with so many columns; a negative `left` is no window.

    In a narrow window a tile has few blocks of keys. Smaller ones are more, and overlap: an H200 has 112 TFLOP/s with
    blocks of 64 keys for a window of 127 and heads of 64, and 84 with 128; 324 and 333 for a window of 1023.
    """
    tiles = _SM90_TILES[dim, value_dim]
    if 0 <= left < (_FEW_BLOCKS - 1) * tiles[0].keys:  # queries of a tile are as many as keys of a block
        return min(tiles, key=lambda one: one.keys)
    return tiles[0]


def sm90_tile_candidates(dim: int, value_dim: int) -> list[Sm90Tiles]:
    """Tiles worth measuring."""
    return _SM90_TILES[dim, value_dim]


def has_sm90_tiles(dim: int, value_dim: int) -> bool:
    """Whether the forward kernel for Hopper has tiles for heads of these sizes."""
    return max(dim, value_dim) <= _TILE_DIMS[-1] and (tile_dim(dim), tile_dim(value_dim)) in _SM90_TILES


def sm90_config(dim: int, causal: bool, queries: int, left: int, fp8: bool, device: torch.device) -> Sm90Config:
    """The configuration of the forward kernel for Hopper; a negative `left` is no window.

    Tiles of a window have the same work, and persistent programs are 10 to 37 % faster. Causal tiles in 8 bits differ
    so much that one program for each is 27 to 43 % faster. Three consumers have no registers for either.
    """
    if fp8:
        return Sm90Config(consumers=2, persistent=not causal, together=1)
    if 0 <= left < queries // 2:
        return Sm90Config(consumers=2, persistent=True, together=1)
    config = from_row(tuned(sm90_table_key(dim, causal), queries, device), Sm90Config)
    config = config or sm90_heuristic(dim, causal, queries)
    return config if left < 0 else replace(config, consumers=2)


def sm90_table_key(dim: int, causal: bool) -> str:
    """The name of the forward kernel for Hopper in tables, where its size is the number of queries."""
    return f"attention_hopper_{dim}" + ("_causal" if causal else "")


def sm90_heuristic(dim: int, causal: bool, queries: int) -> Sm90Config:
    """A configuration for sizes without a measurement."""
    return sm90_candidates(dim, causal)[0 if not causal or queries <= _MAX_PERSISTENT_QUERIES else -1]


def sm90_candidates(dim: int, causal: bool) -> list[Sm90Config]:
    """Configurations worth measuring."""
    consumers = (2,) if dim > 64 else (2, 3) if causal else (3, 2)  # three have registers for small heads alone
    orders = [(True, 1), (True, 4), (True, 16), (False, 1), (False, 8)] if causal else [(True, 1), (True, 4)]
    return [
        Sm90Config(consumers=number, persistent=persistent, together=together)
        for number in consumers
        for persistent, together in orders
    ]


def query_gradient_sums(dim: int, queries: int) -> int:
    """How many partial sums a query gradient has on Hopper: two programs can add to two sums at a time.

    Heads of 64 dimensions have so little to compute that programs of long sequences would wait for each other. For
    others a second sum is not worth its memory traffic.
    """
    return MAX_SUMS if dim == 64 and queries > _MAX_QUERIES_OF_ONE_SUM else 1


_BACKWARD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
"""Columns of the tiles of keys and of values of the backward kernels for Hopper.

Their gradients, float32 of 64 keys for each warpgroup, must leave registers for scores: those of 192 and 192 do not.
"""


def has_sm90_backward(dim: int, value_dim: int) -> bool:
    """Whether the backward kernels for Hopper have tiles for heads of these sizes."""
    return any(
        dim <= columns and value_dim <= value_columns and (columns == value_columns or (dim > 128 and value_dim > 96))
        for columns, value_columns in _BACKWARD_DIMS
    )


def sm90_backward_dims(dim: int, value_dim: int) -> tuple[int, int]:
    """The columns of the tiles of keys and of values for heads of these sizes."""
    return next((columns, values) for columns, values in _BACKWARD_DIMS if dim <= columns and value_dim <= values)


def heads_together(dim: int, causal: bool, group: int, heads: int, blocks: int, processors: int) -> int:
    """How many heads of keys the programs of the backward kernel for Hopper alternate between, a divisor of `heads`.

    Programs of grouped keys are long. One head after the other, with several heads at a time, leaves processors idle at
    the end: an H200 has 463 TFLOP/s that way for 2 x 32/8 heads of 128 and 8192 tokens, and 541 with 16 heads together.
    Few heads together are slower than one, 443, as many programs of a head wait for each other. If one head occupies
    all processors, every other head goes backwards, which is better than alternation: 560 and 549 for 64/8 heads and
    16,384 tokens. Steps of 64 dimensions are so short that waiting takes what is gained, 400 and 398.
    """
    if not causal or group == 1 or dim < _LEAST_ALTERNATING_DIM or 2 * blocks > processors:
        return 1
    most = next(number for number in range(_MOST_HEADS_TOGETHER, 0, -1) if heads % number == 0)
    return most if most >= _FEWEST_HEADS_TOGETHER else 1
