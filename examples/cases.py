"""Cases to time: `nearpeak bench examples/cases.py:softmax`.

A case is a function that builds its inputs and returns the callable to time. Its parameters have defaults, and are
what a sweep varies. Inputs are on the GPU when there is one.

`work` is the least that the operation must do, from which nearpeak computes the bound: here every operand crosses
memory once, and a multiply-add counts as 2 FLOP.
"""

from __future__ import annotations

import torch

import nearpeak
from nearpeak import inputs


def softmax(rows: int = 4096, columns: int = 4096, dtype: str = "float32") -> nearpeak.Case:
    """Softmax over the rows of a matrix: limited by memory."""
    x = inputs.activations(rows, columns, dtype=dtype)
    work = nearpeak.Work(bytes_read=x.nbytes, bytes_written=x.nbytes)
    return nearpeak.Case(torch.softmax, x, -1, work=work)


def matmul(m: int = 1024, n: int = 1024, k: int = 1024, dtype: str = "float32") -> nearpeak.Case:
    """The product of an m x k and a k x n matrix: limited by compute once all three are large."""
    a = inputs.activations(m, k, dtype=dtype, seed=0)
    b = inputs.activations(k, n, dtype=dtype, seed=1)
    work = nearpeak.Work(
        flops={dtype: 2.0 * m * n * k},
        bytes_read=a.nbytes + b.nbytes,
        bytes_written=m * n * a.element_size(),
    )
    return nearpeak.Case(torch.matmul, a, b, work=work)


def rms_norm(tokens: int = 4096, width: int = 4096, dtype: str = "float32") -> nearpeak.Case:
    """RMSNorm written in plain torch: several passes over memory where one would do."""
    x = inputs.activations(tokens, width, dtype=dtype, seed=0)
    weight = inputs.activations(width, dtype=dtype, seed=1)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * weight

    work = nearpeak.Work(bytes_read=x.nbytes + weight.nbytes, bytes_written=x.nbytes)
    return nearpeak.Case(plain, x, weight, work=work)


def copy(mebibytes: int = 256, dtype: str = "float32") -> nearpeak.Case:
    """A copy into memory that is already there: what the memory can do."""
    source = inputs.activations(mebibytes * 2**20 // getattr(torch, dtype).itemsize, dtype=dtype)
    destination = torch.empty_like(source)
    work = nearpeak.Work(bytes_read=source.nbytes, bytes_written=source.nbytes)
    return nearpeak.Case(torch.Tensor.copy_, destination, source, work=work)
