"""`tiling`: tile and wave quantization of a matrix product on a GPU.

A kernel computes the result in tiles, one per multiprocessor at a time (an occupancy of one block). Where a size of the
result is no multiple of the tile's, edge tiles compute padding (tile quantization). Where the number of tiles is no
multiple of the number of multiprocessors, some of these idle in the last wave (wave quantization). Both follow from
sizes alone.

The tiling is not part of the bound: a kernel may use other tiles, or share the last ones between multiprocessors by
splitting the contraction (split-K, stream-K), so the loss is likely and not certain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nearpeak.machines.machine import Machine
from nearpeak.ops.formulas.matrix import result
from nearpeak.ops.op import Op

Tile = tuple[int, int, int]

# Rows, columns and depth of tiles that reach the rate of the matrix engine, by architecture. Smaller ones exist and
# fill better, but they load their operands more often than shared memory allows at full rate.
# Tensor cores: the largest sizes of cuBLAS as NVIDIA's guide names them ("Matrix Multiplication Background", section
# 2.3: 256x128, 128x256 and 128x128 are the most efficient), with the depth that holds 128 bytes of 16-bit operands
# where asynchronous copies feed the engine, and 32 before. Blackwell: two multiprocessors share a product of 256x256
# (PTX ISA, tcgen05.mma with cta_group::2), which is 128x256 for each.
# AMD: the largest macro tiles of hipBLASLt's kernels for CDNA.
_WIDE = ((256, 128), (128, 256), (128, 128))
_SHALLOW: tuple[Tile, ...] = tuple((*sizes, 32) for sizes in _WIDE)
_DEEP: tuple[Tile, ...] = tuple((*sizes, 64) for sizes in _WIDE)
_MACRO: tuple[Tile, ...] = ((256, 256, 64), *_DEEP)
TILES: dict[str, tuple[Tile, ...]] = {
    "volta": _SHALLOW,
    "turing": _SHALLOW,
    "ampere": _SHALLOW,
    "ada": _SHALLOW,
    "hopper": _DEEP,
    "blackwell": _DEEP,
    "cdna": _DEEP,
    "cdna2": _MACRO,
    "cdna3": _MACRO,
    "cdna4": _MACRO,
}

FACTORS = {
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten._int_mm": ("self", "mat2"),
    "aten.matmul": ("self", "other"),
    "aten.linear": ("input", "weight"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.addmm_": ("mat1", "mat2"),
    "aten._addmm_activation": ("mat1", "mat2"),
    "aten.baddbmm": ("batch1", "batch2"),
    "aten.baddbmm_": ("batch1", "batch2"),
    "aten._scaled_mm": ("self", "mat2"),
    "aten._scaled_mm_v2": ("self", "mat2"),
    "aten._grouped_mm": ("self", "mat2"),
    "aten._scaled_grouped_mm": ("self", "mat2"),
    "aten._scaled_grouped_mm_v2": ("self", "mat2"),
}
"""The names of the two factors of a matrix product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """`batch` products of m x k by k x n, in tiles over processors."""

    batch: int
    m: int
    n: int
    k: int
    tile: Tile
    """Rows, columns and depth."""
    tiles: int
    processors: int

    @property
    def waves(self) -> int:
        """The number of waves, a partial last one included."""
        return math.ceil(self.tiles / self.processors)

    @property
    def last_wave(self) -> float:
        """The share of the processors that have a tile in the last wave."""
        return (self.tiles - (self.waves - 1) * self.processors) / self.processors

    @property
    def fill(self) -> float:
        """The occupancy of the waves: tiles over processors times waves."""
        return self.tiles / (self.waves * self.processors)

    @property
    def useful(self) -> float:
        """The share of the computed elements that are part of the result, and not padding."""
        rows, columns, depth = self.tile
        depths = math.ceil(self.k / depth) * depth
        return self.batch * self.m * self.n * self.k / (self.tiles * rows * columns * depths)

    @property
    def efficiency(self) -> float:
        """The share of the peak that tile and wave quantization leave."""
        return self.fill * self.useful


def tiling(op: Op, machine: Machine) -> Tiling | None:
    """The best tiling of a matrix product on a GPU; None for other ops, and for a machine whose tiles are not known.

    The most efficient of the usual tiles is taken, and the larger one of two equals. A grouped product whose groups
    depend on data (tokens by expert) has no tiling, since its sizes are not known.

    >>> from nearpeak.machines.catalogue import find
    >>> from nearpeak.ops.tensor import Tensor
    >>> a = Tensor(shape=(4096, 4096), strides=(4096, 1), dtype="bfloat16", storage=0)
    >>> b = Tensor(shape=(4096, 4096), strides=(4096, 1), dtype="bfloat16", storage=1)
    >>> out = Tensor(shape=(4096, 4096), strides=(4096, 1), dtype="bfloat16", storage=2)
    >>> tiles = tiling(Op(name="aten.mm.default", arguments={"self": a, "mat2": b}, outputs=(out,)), find("h100-sxm"))
    >>> tiles.tile, tiles.tiles, tiles.waves, round(tiles.efficiency, 2)
    ((256, 128, 64), 512, 4, 0.97)
    """
    return _tiling(product_sizes(op), machine)


def tiling_of_shapes(name: str, shapes: Sequence[Sequence[int]], machine: Machine) -> Tiling | None:
    """As `tiling`, for a product of which the name and the shapes of its tensors are known.

    >>> from nearpeak.machines.catalogue import find
    >>> tiling_of_shapes("aten.addmm.default", [(4096,), (4096, 4096), (4096, 4096)], find("h100-sxm")).tiles
    512
    """
    packet = name.rpartition(".")[0]
    if packet not in ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm") or len(shapes) < 2:
        return None
    left, right = shapes[1:3] if "add" in packet else shapes[:2]
    if len(left) < 2 or len(left) != len(right):
        return None
    sizes = (math.prod(left[:-2]), left[-2], right[-1], left[-1])
    return _tiling(sizes if math.prod(sizes) else None, machine)


def _tiling(sizes: tuple[int, int, int, int] | None, machine: Machine) -> Tiling | None:
    tiles = TILES.get(machine.architecture, ()) if machine.kind == "gpu" else ()
    if sizes is None or not tiles or not machine.processors:
        return None
    return _best(*sizes, tiles, machine.processors)


@functools.lru_cache(maxsize=4096)  # a model has few products of different sizes, and runs them in every layer
def _best(batch: int, m: int, n: int, k: int, tiles: tuple[Tile, ...], processors: int) -> Tiling:
    tilings = [
        Tiling(
            batch=batch,
            m=m,
            n=n,
            k=k,
            tile=tile,
            tiles=batch * math.ceil(m / tile[0]) * math.ceil(n / tile[1]),
            processors=processors,
        )
        for tile in tiles
    ]
    return max(tilings, key=lambda tiling: (round(tiling.efficiency, 9), tiling.tile[0] * tiling.tile[1]))


def product_sizes(op: Op) -> tuple[int, int, int, int] | None:
    """Batch, m, n and k of a product of two matrices; None for other ops and for an empty product."""
    factors = FACTORS.get(op.packet)
    if factors is None:
        return None
    left, right, out = op.tensor(factors[0]), op.tensor(factors[1]), result(op)
    if len(left.shape) < 2 or len(right.shape) < 2 or len(out.shape) < 2:
        return None
    if "grouped" in op.packet and not len(left.shape) == len(right.shape) == 3:
        return None
    m, n = out.shape[-2:]
    batch = math.prod(out.shape[:-2])
    if len(right.shape) == 2:  # one matrix on the right: the rows of a batch lie below each other
        batch, m = 1, batch * m
    k = left.shape[-1] * (2 if left.dtype == "float4_e2m1fn_x2" else 1)
    return (batch, m, n, k) if batch * m * n * k else None
