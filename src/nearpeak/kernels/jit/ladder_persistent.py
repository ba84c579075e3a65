"""A matrix product of which each processor has one program, with tiles copied by TMA, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nearpeak.kernels.configs import processors
from nearpeak.kernels.jit.launch import launch

_ROWS, _COLUMNS, _DEPTH, _GROUP = 128, 256, 64, 8


@triton.jit
def ladder_persistent_kernel(
    result, a, b, to, m, n, k, programs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    for tile in tl.range(tl.program_id(0), rows * columns, programs, flatten=True):
        # GROUP tiles down before the next column, so that programs that run together have rows and columns in common
        band = tile // (GROUP * columns)
        height = tl.minimum(rows - band * GROUP, GROUP)
        row = (band * GROUP + tile % (GROUP * columns) % height) * ROWS
        column = tile % (GROUP * columns) // height * COLUMNS
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, k, DEPTH):
            sums = tl.dot(a.load([row, begin]), b.load([begin, column]), sums)
        to.store([row, column], sums.to(result.dtype.element_ty))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of contiguous matrices of 16 bits whose rows have a multiple of 8 numbers."""
    (m, k), n = a.shape, b.shape[1]
    result = torch.empty(m, n, dtype=a.dtype, device=a.device)
    programs = min(processors(a.device), triton.cdiv(m, _ROWS) * triton.cdiv(n, _COLUMNS))
    descriptors = [
        TensorDescriptor.from_tensor(one, block)
        for one, block in ((a, [_ROWS, _DEPTH]), (b, [_DEPTH, _COLUMNS]), (result, [_ROWS, _COLUMNS]))
    ]
    launch(
        ladder_persistent_kernel, (programs, 1, 1), result, *descriptors, m, n, k, programs, _ROWS, _COLUMNS, _DEPTH,
        _GROUP, warps=8, stages=3,
    )  # fmt: skip
    return result
