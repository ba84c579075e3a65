"""The kernels of `dropout_add`. Random numbers are made where they are used, from a seed and the place of an element.

Philox makes four numbers from one counter. Elements are counted in the order of a contiguous tensor; those of a chunk
of CHUNK elements have the four numbers of CHUNK / 4 counters: the first quarter the first numbers, the second quarter
the second, and so on. So each quarter is loaded by itself and nothing has to be moved between threads. This order is
part of what a seed means: it does not depend on how many programs or threads there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.philox import CHUNK, ROUNDS, scale_of, signed_threshold

_QUARTER = tl.constexpr(CHUNK // 4)
_ROUNDS = tl.constexpr(ROUNDS)
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def four_numbers(key, counter, nothing):
    """The random numbers of counters of 64 bits; `nothing` is 0, in as many elements."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32) + nothing
    high = (counter >> 32).to(tl.uint32) + nothing
    return tl.philox(key, low, high, nothing, nothing, _ROUNDS)


@triton.jit
def _read(x, at, elements):
    return tl.load(x + at, mask=at < elements, other=0.0).to(tl.float32)


@triton.jit
def _write(values, added, result, at, elements, random, threshold, scale):
    # the comparison of unsigned numbers, by signed ones: their order is the same with the highest bit turned round
    kept = (random.to(tl.int32, bitcast=True) ^ _LOWEST) < threshold
    values = tl.where(kept, values * tl.cast(scale, tl.float32), 0.0)
    if added is not None:
        values += added
    tl.store(result + at, values.to(result.dtype.element_ty), mask=at < elements)


@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(x, residual, result, seed, elements, threshold, scale, CHUNKS: tl.constexpr):
    """x dropped and scaled, plus the residual where there is one. A program has CHUNKS chunks."""
    key = tl.load(seed)
    for number in tl.static_range(CHUNKS):
        chunk = tl.program_id(0).to(tl.int64) * CHUNKS + number
        at = chunk * (4 * _QUARTER) + tl.arange(0, _QUARTER)
        values0 = _read(x, at, elements)
        values1 = _read(x, at + _QUARTER, elements)
        values2 = _read(x, at + 2 * _QUARTER, elements)
        values3 = _read(x, at + 3 * _QUARTER, elements)
        added0, added1, added2, added3 = None, None, None, None
        if residual is not None:  # all that is loaded comes first: no load passes a store
            added0 = _read(residual, at, elements)
            added1 = _read(residual, at + _QUARTER, elements)
            added2 = _read(residual, at + 2 * _QUARTER, elements)
            added3 = _read(residual, at + 3 * _QUARTER, elements)
        # 0, and of the layout of what was loaded: with it each thread makes the random numbers of its own elements,
        # which otherwise go through shared memory
        nothing = (values0.to(tl.uint32, bitcast=True).to(tl.uint64) >> 32).to(tl.uint32)
        counter = chunk * _QUARTER + tl.arange(0, _QUARTER)
        random0, random1, random2, random3 = four_numbers(key, counter, nothing)
        _write(values0, added0, result, at, elements, random0, threshold, scale)
        _write(values1, added1, result, at + _QUARTER, elements, random1, threshold, scale)
        _write(values2, added2, result, at + 2 * _QUARTER, elements, random2, threshold, scale)
        _write(values3, added3, result, at + 3 * _QUARTER, elements, random3, threshold, scale)


def dropout_add(x: Tensor, residual: Tensor, seed: Tensor, p: float, *, config: dict[str, Any] | None = None) -> Tensor:
    """Tensors that are not contiguous are copied first."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x.contiguous(), residual.contiguous(), result, seed, p, config)
    return result


def dropout_backward(
    gradient: Tensor, seed: Tensor, p: float, dtype: torch.dtype, *, config: dict[str, Any] | None = None
) -> Tensor:
    """The gradient of x; one that is not contiguous is copied first."""
    result = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    _launch(gradient.contiguous(), None, result, seed, p, config)
    return result


def _launch(
    x: Tensor, residual: Tensor | None, result: Tensor, seed: Tensor, p: float, config: dict[str, Any] | None
) -> None:
    elements = x.numel()
    config = config or tuned("dropout_add", elements, x.device) or heuristic(elements)
    grid = (triton.cdiv(elements, config["chunks"] * CHUNK), 1, 1)
    arguments = (x, residual, result, seed, elements, signed_threshold(p), scale_of(p))
    launch(dropout_kernel, grid, *arguments, config["chunks"], warps=config["warps"])


def heuristic(elements: int) -> dict[str, Any]:
    """What to launch with for so many elements, where nobody measured."""
    return {"chunks": 1, "warps": 4}


def candidates(elements: int) -> list[dict[str, Any]]:
    """Configurations worth measuring for so many elements."""
    return [{"chunks": chunks, "warps": warps} for chunks in (1, 2, 4) for warps in (2, 4, 8)]
