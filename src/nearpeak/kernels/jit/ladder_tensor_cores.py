"""A matrix product by tensor cores in the plainest Triton: one program for each tile of the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch

_SIDE, _DEPTH, _GROUP = 128, 64, 8


@triton.jit
def ladder_tensor_cores_kernel(a, b, result, m, n, k, SIDE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    program = tl.program_id(0)
    # GROUP tiles down before the next column, so that programs that run together have rows and columns in common
    rows, columns = tl.cdiv(m, SIDE), tl.cdiv(n, SIDE)
    band = program // (GROUP * columns)
    height = tl.minimum(rows - band * GROUP, GROUP)
    row = (band * GROUP + program % (GROUP * columns) % height).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = (program % (GROUP * columns) // height).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    step = tl.arange(0, DEPTH)
    from_a = a + row[:, None] * k + step[None, :]
    from_b = b + step[:, None].to(tl.int64) * n + column[None, :]
    in_rows, in_columns = (row < m)[:, None], (column < n)[None, :]
    sums = tl.zeros([SIDE, SIDE], tl.float32)
    for begin in range(0, k, DEPTH):
        left = tl.load(from_a, mask=in_rows & (begin + step < k)[None, :], other=0.0)
        right = tl.load(from_b, mask=in_columns & (begin + step < k)[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
        from_a += DEPTH
        from_b += DEPTH * n
    tl.store(result + row[:, None] * n + column[None, :], sums.to(result.dtype.element_ty), mask=in_rows & in_columns)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of contiguous matrices of 16 bits."""
    (m, k), n = a.shape, b.shape[1]
    result = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, _SIDE) * triton.cdiv(n, _SIDE)
    launch(
        ladder_tensor_cores_kernel, (tiles, 1, 1), a, b, result, m, n, k, _SIDE, _DEPTH, _GROUP, warps=4, stages=4
    )  # fmt: skip
    return result
