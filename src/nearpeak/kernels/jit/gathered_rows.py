"""Rows that lie apart in memory, copied into a ring in shared memory by two warps, in Gluon.

The hardware copies tiles whose rows are a stride apart. The rows of an expert are those of its tokens, wherever these
are: each thread has 16 bytes of a row copied at a time, and arrives at the barrier of a step when its copies are done.
Products read shared memory past what threads write there: who multiplies puts a fence between the barrier and them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

THREADS = gl.constexpr(64)
"""Of two warps: as many arrive at the barrier of a step."""


@gluon.constexpr_function
def gathered_layout(bits=16):
    """Elements of 8 rows, 16 bytes for each thread."""
    return gl.BlockedLayout([1, 128 // bits], [4, 8], [2, 1], [1, 0])


@gluon.jit
def copy_of_tokens(target, tokens, own, inside, column, columns):
    """Has some columns of rows copied that begin at `own`. What is not inside, or behind the columns, becomes zeros."""
    wide: gl.constexpr = target.shape[1]
    layout: gl.constexpr = gathered_layout(target.dtype.primitive_bitwidth)
    column += gl.arange(0, wide, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        target, tokens + (own[:, None] + column[None, :]), inside[:, None] & (column < columns)[None, :]
    )
