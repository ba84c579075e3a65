"""Operands of attention in fp8: their quantization, with one scale for each head.

The forward pass is that of `sm90`. Tensor cores multiply numbers of 8 bits twice as fast as those
of 16. Weights are rounded to 8 bits as well, 2 ** 8 times as large, so that none that matters is below the smallest
normal number.

Tensor cores take values of 8 bits by columns alone, so that values are transposed when they are quantized. Their keys
are in the order in which a thread has weights (`_as_left_operand` in `sm90`), and the last 128 are filled with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.policy import INTERPRETED

DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max
LARGEST = tl.constexpr(_LARGEST)
CLAMPS = tl.constexpr(INTERPRETED)
"""A GPU saturates in the conversion to 8 bits; the interpreter does not."""
_BLOCK_TOKENS = 128
"""Tokens of a program; those of transposed values are a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Inputs:
    """Operands in 8 bits. A number times the scale of its head, [batch, heads], is what was quantized."""

    query: Tensor
    """[batch, heads, queries, dim]."""
    key: Tensor
    """[batch, key heads, keys, dim]."""
    value: Tensor
    """[batch, key heads, dim, keys], with keys in the order of weights, and padded."""
    query_scales: Tensor
    key_scales: Tensor
    value_scales: Tensor


@triton.jit(do_not_specialize=["tokens", "heads"])
def head_maxima_kernel(
    x, maxima, batch_stride, head_stride, stride, tokens, heads, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest magnitude of each head, as the bits of a float32, which are in the order of the numbers."""
    head_index = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    x += head_index // heads * batch_stride + head_index % heads * head_stride
    tile = tl.load(x + rows.to(tl.int64) * stride + tl.arange(0, DIM)[None, :], mask=rows < tokens, other=0.0)
    largest = tl.max(tl.max(tl.abs(tile.to(tl.float32)), 1), 0)
    tl.atomic_max(maxima + head_index, largest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["tokens", "heads"])
def quantize_heads_kernel(
    x, maxima, result, scales, batch_stride, head_stride, stride, tokens, heads, padded,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one head, [head, tokens, DIM] or TRANSPOSED [head, DIM, padded], and the scale of a head."""
    head_index = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = place
    if TRANSPOSED:  # the token at a place: of 16, two of the first and two of the last 8 are next to each other
        token = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    rows = token[:, None]
    column = tl.arange(0, DIM)[None, :]
    largest = tl.load(maxima + head_index).to(tl.float32, bitcast=True)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    x += head_index // heads * batch_stride + head_index % heads * head_stride
    tile = tl.load(x + rows.to(tl.int64) * stride + column, mask=rows < tokens, other=0.0).to(tl.float32) / scale
    if CLAMPS:
        tile = tl.minimum(tl.maximum(tile, -LARGEST), LARGEST)
    small = tile.to(result.dtype.element_ty)
    if TRANSPOSED:
        target = result + head_index * DIM * padded + tl.arange(0, DIM)[:, None] * padded.to(tl.int64) + place[None, :]
        tl.store(target, tl.trans(small))
    else:
        tl.store(result + (head_index * tokens + rows) * DIM + column, small, mask=rows < tokens)
    tl.store(scales + head_index, scale)


def quantized(query: Tensor, key: Tensor, value: Tensor) -> Fp8Inputs:
    """Tensors [batch, heads, tokens, dim] in 8 bits, with a scale for each head."""
    (query, query_scales), (key, key_scales), (value, value_scales) = (
        _quantized(x, transposed) for x, transposed in ((query, False), (key, False), (value, True))
    )
    return Fp8Inputs(
        query=query, key=key, value=value, query_scales=query_scales, key_scales=key_scales, value_scales=value_scales
    )


def _quantized(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    batches, heads, tokens, dim = x.shape
    blocks = triton.cdiv(tokens, _BLOCK_TOKENS)
    padded = blocks * _BLOCK_TOKENS
    maxima = torch.zeros(batches * heads, dtype=torch.int32, device=x.device)
    scales = torch.empty((batches, heads), device=x.device)
    shape = (batches, heads, dim, padded) if transposed else x.shape
    result = torch.empty(shape, dtype=DTYPE, device=x.device)
    grid = (blocks, batches * heads, 1)
    launch(head_maxima_kernel, grid, x, maxima, *x.stride()[:3], tokens, heads, dim, _BLOCK_TOKENS)
    launch(
        quantize_heads_kernel, grid, x, maxima, result, scales, *x.stride()[:3], tokens, heads, padded, dim,
        _BLOCK_TOKENS, transposed, warps=8,
    )  # fmt: skip
    return result, scales
