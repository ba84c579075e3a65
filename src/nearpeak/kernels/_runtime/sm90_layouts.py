"""Register layouts of Hopper's warpgroup matrix instructions (wgmma), for kernels in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def wgmma_layout(columns, bits=16):
    """The layout of the accumulator of a warpgroup: 64 rows and so many columns, of operands of so many bits."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits])
