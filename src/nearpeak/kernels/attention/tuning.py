"""Configurations of the attention kernels: the heuristic, and the candidates for the tuner.

A configuration has the block of queries, the block of keys, warps and pipeline stages. On Hopper only configurations
with reproducible results may be chosen: matrix products of eight warps in Triton 3.6 are not all deterministic.
"""

from __future__ import annotations

from typing import Any

_FLOAT32_BYTES = 4
"""Bytes of a float32, whose products take no tensor cores, and whose tiles take twice the memory."""


def forward_heuristic(widest: int, itemsize: int, plain: bool) -> dict[str, Any]:
    """For heads of this size, rounded up to a power of 2; scores that are not plain take registers of their own.

    All of these take less than the 99 KB of shared memory that the GPUs with the least have.
    """
    if itemsize == _FLOAT32_BYTES:
        return {"queries": 32, "keys": 16, "warps": 4, "stages": 1}
    if widest <= 64:
        return {"queries": 128 if plain else 64, "keys": 64, "warps": 4, "stages": 3 if plain else 2}
    if widest <= 128:
        return {"queries": 64, "keys": 64 if plain else 32, "warps": 4, "stages": 2}
    return {"queries": 64, "keys": 32, "warps": 4, "stages": 1}


def keys_heuristic(widest: int, itemsize: int) -> dict[str, Any]:
    """For the gradients of keys and values."""
    if itemsize == _FLOAT32_BYTES:
        return {"queries": 16, "keys": 32, "warps": 4, "stages": 1}
    if widest <= 64:
        return {"queries": 64, "keys": 64, "warps": 4, "stages": 2}
    if widest <= 128:
        return {"queries": 16, "keys": 64, "warps": 4, "stages": 2}
    return {"queries": 16, "keys": 64, "warps": 8, "stages": 2}


def queries_heuristic(widest: int, itemsize: int) -> dict[str, Any]:
    """For the gradient of queries."""
    if itemsize == _FLOAT32_BYTES:
        return {"queries": 32, "keys": 16, "warps": 4, "stages": 1}
    if widest <= 64:
        return {"queries": 64, "keys": 64, "warps": 4, "stages": 3}
    if widest <= 128:
        return {"queries": 64, "keys": 32, "warps": 4, "stages": 3}
    return {"queries": 64, "keys": 16, "warps": 4, "stages": 1}


_TILES = {
    "attention_forward": ((128, 64), (128, 128), (64, 64), (64, 128)),
    "attention_keys": ((64, 128), (32, 128), (64, 64), (128, 128), (32, 64)),
    "attention_queries": ((128, 64), (128, 128), (64, 64), (128, 32), (64, 32)),
}
"""Queries and keys of the tiles of scores that are worth measuring. A kernel holds sums for one of both."""
_MAX_TILE = {64: 128 * 128, 128: 128 * 128, 256: 64 * 64}


def candidates(kernel: str, widest: int) -> list[dict[str, Any]]:
    """Configurations worth measuring, for 16 bits: 64 rows of sums for four warps, or 128 of few columns."""
    most = _MAX_TILE[max(widest, 64)]
    return [
        {"queries": queries, "keys": keys, "warps": warps, "stages": stages}
        for queries, keys in _TILES[kernel]
        for warps in (4, 8)
        for stages in (2, 3)
        if queries * keys <= most
        and (warps == _warps_for_tile(kernel, queries, keys) or (widest <= 64 and queries != keys))
    ]


def _warps_for_tile(kernel: str, queries: int, keys: int) -> int:
    return (keys if kernel == "attention_keys" else queries) // 16
