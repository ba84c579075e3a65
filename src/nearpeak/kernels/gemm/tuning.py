"""Configurations of the GEMM kernels: their heuristics, and the candidates that are worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
from torch import Tensor

from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.tuning import processors

SM90_ROW_BYTES = 128
"""A row of an operand's tile on Hopper: as wide as the swizzle of shared memory."""
_SHARED_BYTES = 232_448
"""Shared memory of one program on Hopper."""
_BARRIER_BYTES = 512
_LEAST_STAGES, _MOST_STAGES = 3, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableConfig:
    """Of `gemm_kernel`: the sizes of a tile, and how it is pipelined."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def portable_heuristic(a: Tensor, result: Tensor, has_gate: bool, tf32: bool) -> PortableConfig:
    """The configuration for a product. The shape of the result decides, not its size: there is no table of these."""
    rows, columns = (max(16, next_power_of_2(size)) for size in result.shape)
    # fp8 scales cover 128 features, which limits a block; float32 without tensor cores needs registers, and its sums
    # are more exact the shorter the blocks
    block_k = {4: 32 if tf32 else 16, 2: 64, 1: 128}[a.element_size()]
    # float32 accumulators have a compensation term each; with masked loads as well, larger tiles would spill
    crowded = a.element_size() == 4 and not tf32 and a.shape[1] % block_k != 0
    block_m, block_n = min(rows, 128), min(columns, 64 if has_gate or crowded else 128)
    # smaller tiles until every multiprocessor has one
    wanted = processors(result.device)
    while block_n > 32 and triton.cdiv(result.shape[0], block_m) * triton.cdiv(result.shape[1], block_n) < wanted:
        if block_m > 64:
            block_m //= 2
        else:
            block_n //= 2
    warps = 8 if block_m * block_n * (2 if has_gate else 1) >= (4096 if crowded else 16384) else 4
    return PortableConfig(block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Config:
    """Of `gemm_sm90_kernel`."""

    rows: int
    """Rows of a tile that one warpgroup has."""
    consumers: int
    """Warpgroups that multiply."""
    block_n: int
    slices: int
    """The epilogue stores a warpgroup's part of a tile in so many slices of columns."""
    buffers: int
    """Slices in shared memory of each warpgroup."""
    stages: int
    """Slots of the ring buffer of operands."""
    tile_group: int | None = None
    """Rows of tiles that are taken together; None for as many as keep their operands in the L2 cache."""

    @property
    def block_m(self) -> int:
        return self.rows * self.consumers

    def shared_bytes(self, gated: bool, itemsize: int) -> int:
        """The shared memory of a program, for a result with elements of so many bytes."""
        columns = self.block_n * (2 if gated else 1)
        ring = self.stages * (self.block_m + columns) * SM90_ROW_BYTES
        return ring + self.buffers * self.block_m * self.block_n // self.slices * itemsize + _BARRIER_BYTES


def sm90_heuristic(result: Tensor, kind: str = "16_bits", has_residual: bool = False, keep: bool = False) -> Sm90Config:
    """The configuration where none was measured: with two warpgroups, and the shortest estimated time."""
    programs = processors(result.device)

    def cost(config: Sm90Config) -> float:
        tall, wide = config.block_m, config.block_n
        tiles = triton.cdiv(result.shape[0], tall) * triton.cdiv(result.shape[1], wide)
        # a small tile reads more bytes per FLOP, and has an epilogue as well
        waves: float = triton.cdiv(tiles, programs) * (tall * wide + 2048.0) * (1.0 + 16.0 / tall + 16.0 / wide)
        return waves

    candidates = sm90_candidates(kind, result.element_size(), has_residual, keep)
    return min((config for config in candidates if config.consumers == 2), key=cost)


def sm90_candidates(
    kind: str = "16_bits", itemsize: int = 2, has_residual: bool = False, keep: bool = False
) -> list[Sm90Config]:
    """Configurations worth measuring, the likely best first.

    Storing a result in slices leaves room for a longer ring buffer; a residual arrives in time if it is loaded whole.
    Storing the input of the activation takes registers, so that slices are smaller.
    """
    return list(_sm90_candidates(kind, itemsize, has_residual, keep))


def _sm90_candidates(kind: str, itemsize: int, has_residual: bool, keep: bool) -> Iterator[Sm90Config]:
    gated = kind.endswith("_gated")
    if kind.startswith("8_bits") and "fast" not in kind:  # two accumulators: of one block, and the float32 sum
        shapes = [(64, 2, 64), (64, 3, 64)] if gated else [(64, 2, 128), (64, 3, 128)]
    elif gated:
        shapes = [(64, 2, 128), (64, 2, 64)] if keep else [(64, 2, 128), (128, 2, 64), (64, 2, 64)]
    else:
        shapes = [(64, 2, 256), (128, 2, 128), (64, 2, 128)]
    for rows, consumers, block_n in shapes:
        for slices, buffers in _store_options(rows, block_n, has_residual, keep):
            for stages in range(_MOST_STAGES, _LEAST_STAGES - 1, -1):
                config = Sm90Config(
                    rows=rows, consumers=consumers, block_n=block_n, slices=slices, buffers=buffers, stages=stages
                )
                if config.shared_bytes(gated, itemsize) <= _SHARED_BYTES:
                    yield config
                    break


def _store_options(rows: int, columns: int, has_residual: bool, keep: bool) -> list[tuple[int, int]]:
    """Slices of a warpgroup's part of a tile, and buffers for them."""
    narrow = columns // 64  # slices of 64 columns: 128 bytes in 16 bits, as wide as the swizzle
    if keep:
        return [(min(narrow, 4), 1 if has_residual else 2)]
    if rows * columns <= 8192:
        return [(1, 1)]
    if has_residual:
        return [(1, 1), (min(narrow, 2), 1)]
    return [(narrow, 2), (2, 1), (1, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig:
    """Of `grouped_gemm_kernel`: columns and depth of a tile, and how it is pipelined."""

    width: int
    depth: int
    warps: int
    stages: int


def grouped_heuristic(height: int, itemsize: int, gated: bool) -> GroupedConfig:
    """Tiles of `height` rows whose accumulators, two of them with a gate, fit into registers."""
    if itemsize == 4:  # compensated sums: twice the registers, and more exact the shorter the blocks
        tall = height >= 64
        return GroupedConfig(
            width=32 if gated or height == 128 else 64, depth=16, warps=8 if tall else 4, stages=2 if tall else 3
        )
    width, depth = 64 if gated else 128, 128 // itemsize
    if height < 64:  # few rows: limited by how fast the weights are read
        return GroupedConfig(width=width, depth=depth, warps=4, stages=4)
    return GroupedConfig(width=width, depth=depth, warps=8 if height == 128 else 4, stages=3)


def grouped_candidates(height: int, gated: bool = False) -> list[GroupedConfig]:
    """Configurations of `grouped_gemm_kernel` worth measuring, for tiles of so many rows."""
    sums = 2 if gated else 1
    return [
        GroupedConfig(width=width, depth=64, warps=warps, stages=stages)
        for width in (64, 128, 256)
        for warps in (4, 8)
        for stages in (3, 4)
        if 16 <= sums * height * width // (32 * warps) <= 128 and (height + sums * width) * 64 * 2 * stages < 220_000
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGradientConfig:
    """Of `grouped_weight_gradient_kernel`: columns and depth of a tile of the weight, and rows of a step."""

    columns: int
    depth: int
    rows: int
    warps: int
    stages: int


def grouped_gradient_heuristic(itemsize: int) -> GroupedGradientConfig:
    """The configuration for elements of so many bytes."""
    if itemsize == 4:
        return GroupedGradientConfig(columns=64, depth=64, rows=16, warps=8, stages=2)
    return GroupedGradientConfig(columns=128, depth=128, rows=64, warps=8, stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90GroupedConfig:
    """Of `grouped_gemm_sm90_kernel`: columns of a tile, ring buffer slots, and store buffers of each warpgroup."""

    width: int
    stages: int
    buffers: int


SM90_GROUPED_CONFIGS = (
    Sm90GroupedConfig(width=256, stages=4, buffers=1),
    Sm90GroupedConfig(width=256, stages=3, buffers=2),
    Sm90GroupedConfig(width=128, stages=6, buffers=2),
)
"""Candidates. The first serves sizes that were not measured. In the table the size is the mean number of rows per
expert.

By arithmetic, with 128 experts, 32,768 rows and 1,536 columns, partial tiles and the wait for the last program make the
first two do 1.16 times the work of the rows, whether experts are drawn evenly or by Beta(1, 5); with a static schedule
it would be 1.29. Tiles with rows as columns of the product, of 256 rows and up to 320 at an expert's end, would have
1.11 and 1.29, and on an H200 were no faster in the former case and 13 % slower in the latter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90GroupedGradientConfig:
    """Of `grouped_weight_gradient_sm90_kernel`: columns of a tile, rows of a step, and ring buffer slots."""

    width: int
    depth: int
    stages: int


SM90_GROUPED_GRADIENT_CONFIGS = (
    Sm90GroupedGradientConfig(width=256, depth=32, stages=6),
    Sm90GroupedGradientConfig(width=256, depth=64, stages=3),
)
"""Candidates, as above. Steps of few rows waste less at an expert's end: 566 TFLOP/s instead of 522 with 32,768 rows
that are drawn evenly for 128 experts."""
