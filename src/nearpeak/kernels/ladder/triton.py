"""The two rungs of the ladder in Triton: tensor cores with one program per tile, and a persistent kernel with TMA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.tuning import processors
from nearpeak.kernels.ladder import PERSISTENT_COLUMNS, PERSISTENT_ROWS, TENSOR_CORES_SIDE

_DEPTH, _GROUP = 64, 8
"""Depth of a tile, and rows of tiles that are taken together."""


@triton.jit
def ladder_tensor_cores_kernel(a, b, result, m, n, k, SIDE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    """One tile of the result."""
    program = tl.program_id(0)
    # GROUP tiles down before the next column: programs in flight share rows and columns
    rows, columns = tl.cdiv(m, SIDE), tl.cdiv(n, SIDE)
    band = program // (GROUP * columns)
    height = tl.minimum(rows - band * GROUP, GROUP)
    row = (band * GROUP + program % (GROUP * columns) % height).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = (program % (GROUP * columns) // height).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    step = tl.arange(0, DEPTH)
    from_a = a + row[:, None] * k + step[None, :]  # (side, depth)
    from_b = b + step[:, None].to(tl.int64) * n + column[None, :]  # (depth, side)
    in_rows, in_columns = (row < m)[:, None], (column < n)[None, :]
    sums = tl.zeros([SIDE, SIDE], tl.float32)
    for begin in range(0, k, DEPTH):
        left = tl.load(from_a, mask=in_rows & (begin + step < k)[None, :], other=0.0)
        right = tl.load(from_b, mask=in_columns & (begin + step < k)[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
        from_a += DEPTH
        from_b += DEPTH * n
    tl.store(result + row[:, None] * n + column[None, :], sums.to(result.dtype.element_ty), mask=in_rows & in_columns)


def multiply_tensor_cores(a: Tensor, b: Tensor, stages: int = 4) -> Tensor:
    """a @ b of contiguous 16-bit matrices; with one stage no tile is copied ahead of its use."""
    (m, k), n = a.shape, b.shape[1]
    result = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, TENSOR_CORES_SIDE) * triton.cdiv(n, TENSOR_CORES_SIDE)
    launch(
        ladder_tensor_cores_kernel, (tiles, 1, 1), a, b, result, m, n, k, TENSOR_CORES_SIDE, _DEPTH, _GROUP, warps=4,
        stages=stages,
    )  # fmt: skip
    return result


@triton.jit
def ladder_persistent_kernel(
    result, a, b, to, m, n, k, programs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of the result, in turns with the other programs; `a`, `b` and `to` are TMA descriptors."""
    rows, columns = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    for tile in tl.range(tl.program_id(0), rows * columns, programs, flatten=True):
        # GROUP tiles down before the next column: programs in flight share rows and columns
        band = tile // (GROUP * columns)
        height = tl.minimum(rows - band * GROUP, GROUP)
        row = (band * GROUP + tile % (GROUP * columns) % height) * ROWS
        column = tile % (GROUP * columns) // height * COLUMNS
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, k, DEPTH):
            sums = tl.dot(a.load([row, begin]), b.load([begin, column]), sums)
        to.store([row, column], sums.to(result.dtype.element_ty))


def multiply_persistent(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of contiguous 16-bit matrices whose rows have a multiple of 8 elements."""
    (m, k), n = a.shape, b.shape[1]
    result = torch.empty(m, n, dtype=a.dtype, device=a.device)
    programs = min(processors(a.device), triton.cdiv(m, PERSISTENT_ROWS) * triton.cdiv(n, PERSISTENT_COLUMNS))
    descriptors = [
        TensorDescriptor.from_tensor(matrix, block)
        for matrix, block in (
            (a, [PERSISTENT_ROWS, _DEPTH]),
            (b, [_DEPTH, PERSISTENT_COLUMNS]),
            (result, [PERSISTENT_ROWS, PERSISTENT_COLUMNS]),
        )
    ]
    launch(
        ladder_persistent_kernel, (programs, 1, 1), result, *descriptors, m, n, k, programs, PERSISTENT_ROWS,
        PERSISTENT_COLUMNS, _DEPTH, _GROUP, warps=8, stages=3,
    )  # fmt: skip
    return result
