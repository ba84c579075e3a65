"""`compiled`: CUDA C++ compiled when it is first wanted, by the compiler that torch has with it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import KernelUnavailable, UsageError

BFLOAT16 = """
// bfloat16 is the upper half of a float32
__device__ __forceinline__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ unsigned short rounded(float value) {  // to the nearest, ties to even
    unsigned bits = __float_as_uint(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
"""
"""What all sources begin with; so no header of CUDA is needed."""


@functools.cache
def compiled(source: str, name: str) -> Any:
    """The kernel of this name, to be called with grid, block and args."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise KernelUnavailable(f"torch {torch.__version__} does not compile CUDA at run time; it needs 2.9 or later.")
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:  # torch lists its headers, and raises where there is none, needed or not
        cpp_extension.CUDA_HOME = "/usr/local/cuda"
    return compile_kernel(BFLOAT16 + source, name)


def result_of(a: Tensor, b: Tensor, multiples: tuple[int, int, int]) -> Tensor:
    """An empty result, of matrices that kernels without a test for edges can take."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or not a.dtype == b.dtype == torch.bfloat16:
        raise UsageError(
            f"A rung multiplies bfloat16 of m x k by k x n; these are {a.dtype} and {b.dtype} of {tuple(a.shape)} and"
            f" {tuple(b.shape)}."
        )
    if not a.is_contiguous() or not b.is_contiguous():
        raise UsageError("A rung multiplies contiguous matrices.")
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    if any(size % multiple for size, multiple in zip(sizes, multiples, strict=True)):
        raise UsageError(f"This rung takes m, n and k that are multiples of {multiples}; these are {sizes}.")
    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
