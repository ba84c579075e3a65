"""Launchers of the Gluon kernels for Hopper, and which problems they take.

They take plain attention, full or causal, of 16-bit dtypes and heads of 64 or 128 dimensions. The portable kernels take
the rest.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.tuning import processors, tuned
from nearpeak.kernels.attention.triton import AttentionProblem, addressable, statistics

_DIMS = (64, 128)
_KEY_BLOCK = 128
"""Keys of a block."""
_PAIR = 128
"""Queries of a pair of blocks of the backward pass, and keys of one of its programs."""
_WARPGROUP_ROWS = 64
_MAX_SUMS = 2
"""Sums of each gradient of queries."""
_SUM_ROWS = 32
_TMA_ALIGNMENT = 16
_MAX_QUERIES_OF_ONE_SUM = 4096
"""Queries up to which one sum is enough."""
_MAX_PERSISTENT_TOKENS = 8192
"""Tokens up to which programs of causal attention go from tile to tile: in longer sequences tiles differ so much that
the GPU had better give them out one by one."""


@triton.jit(do_not_specialize=["heads", "queries", "padded", "blocks", "diagonal"])
def attention_sums_kernel(
    sums, by_query, batch_stride, head_stride, stride, scale, heads, queries, padded, blocks, diagonal, size,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, SUMS: tl.constexpr, PAIR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, of all sums to which something was added."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last were added to last, and are in the cache
    first = program % (padded // ROWS) * ROWS
    number = (program // (padded // ROWS)).to(tl.int64)
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    parts = blocks
    if CAUSAL:
        parts = tl.minimum(tl.cdiv(tl.maximum(first // PAIR * PAIR + PAIR + diagonal, 0), PAIR), blocks)
    total = tl.zeros([ROWS, DIM], tl.float32)
    at = (number * padded + row) * DIM + column
    for part in tl.static_range(SUMS):
        total += tl.load(sums + part * size + at, mask=(row < queries) & (part < parts), other=0.0)
    batch, head = number // heads, number % heads
    place = batch * batch_stride + head * head_stride + row.to(tl.int64) * stride + column
    found = total * tl.cast(scale, tl.float32)
    tl.store(by_query + place, found.to(by_query.dtype.element_ty), mask=row < queries)


def takes(problem: AttentionProblem) -> bool:
    """Whether these kernels are for a problem, on its device."""
    return (
        gluon.runs_on(problem.query.device)
        and problem.query.dtype in (torch.bfloat16, torch.float16)
        and problem.dim == problem.value_dim
        and problem.dim in _DIMS
        and problem.is_plain
        and not problem.packed
        and problem.sinks is None
        and problem.dropout == 0.0
        and problem.left < 0
        and problem.right in (-1, 0)
        and 0 not in (problem.batches, problem.queries, problem.keys)
        and problem.batches * problem.heads * (problem.queries + _PAIR) * _MAX_SUMS < 2**31
        and all(map(_is_tma_copyable, (problem.query, problem.key, problem.value)))
    )


def _is_tma_copyable(x: Tensor) -> bool:
    """Whether tiles of [batch, heads, tokens, dim] can be copied by one instruction."""
    by_stride = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return (
        x.stride(-1) == 1
        and x.data_ptr() % _TMA_ALIGNMENT == 0
        and all(
            stride > 0 and stride * x.element_size() % _TMA_ALIGNMENT == 0 for size, stride in by_stride if size > 1
        )
    )


def _tile_descriptor(x: Tensor, rows: int) -> Any:
    """Tiles of so many tokens of a head."""
    block = [1, 1, rows, x.shape[-1]]
    if 1 in x.shape[:-1]:  # the stride of one element says nothing, and must be a multiple of 16 bytes all the same
        strides = [x.stride(-1) * x.shape[-1] if n == 1 else s for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
        x = torch.as_strided(x, x.shape, (*strides, 1))
    return gluon.descriptor(x, block)


def _diagonal_offset(problem: AttentionProblem) -> int:
    """Query i is beside key i + diagonal."""
    return problem.keys - problem.queries if problem.bottom_right else 0


def sm90_kernel_name(dim: int, causal: bool) -> str:
    """What the forward kernel is called in tables, where its size is the number of queries."""
    return f"attention_hopper_{dim}" + ("_causal" if causal else "")


def sm90_heuristic(dim: int, causal: bool, queries: int) -> dict[str, Any]:
    """How the work is shared where nobody measured."""
    return sm90_candidates(dim, causal)[0 if not causal or queries <= _MAX_PERSISTENT_TOKENS else -1]


def sm90_candidates(dim: int, causal: bool) -> list[dict[str, Any]]:
    """Ways to share the work: warpgroups that compute, whether programs go from tile to tile, and heads at a time."""
    consumers = (2,) if dim == 128 else (2, 3) if causal else (3, 2)
    orders = [(True, 1), (True, 4), (True, 16), (False, 1), (False, 8)] if causal else [(True, 1), (True, 4)]
    return [
        {"consumers": number, "persistent": persistent, "together": together}
        for number in consumers
        for persistent, together in orders
    ]


def forward(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the logarithms of sums of exponentials, in float32."""
    from nearpeak.kernels.attention.sm90 import attention_hopper_kernel

    result = problem.by_token(problem.batches, problem.queries, problem.heads, problem.dim)
    lse = problem.by_head(float("-inf"))
    causal = problem.right == 0
    device = problem.query.device
    config = tuned(sm90_kernel_name(problem.dim, causal), problem.queries, device)
    config = config or sm90_heuristic(problem.dim, causal, problem.queries)
    consumers, persistent = config["consumers"], config["persistent"]
    blocks = triton.cdiv(problem.queries, consumers * _WARPGROUP_ROWS)
    heads = problem.batches * problem.heads
    tiles = blocks * heads
    programs = min(processors(device), tiles) if persistent else tiles
    launch(
        attention_hopper_kernel, (programs, 1, 1), lse, _tile_descriptor(problem.query, _WARPGROUP_ROWS),
        _tile_descriptor(problem.key, _KEY_BLOCK), _tile_descriptor(problem.value, _KEY_BLOCK), _tile_descriptor(result, _WARPGROUP_ROWS),
        problem.scale * math.log2(math.e),
        problem.queries, problem.keys, problem.heads, problem.group, blocks, tiles, math.gcd(config["together"], heads),
        _diagonal_offset(problem),
        _KEY_BLOCK, problem.dim, consumers, 2 if problem.dim == 128 else 3, causal, causal and persistent,
        warps=4, registers=168 if consumers == 2 else 128,
    )  # fmt: skip
    return result, lse


def sums_of(dim: int, queries: int) -> int:
    """How many sums a gradient of queries has: with two, two programs can add to it at a time.

    Heads of 64 dimensions have so little to compute that programs of long sequences wait for each other. For others it
    is not worth the memory that is written and read once more.
    """
    return _MAX_SUMS if dim == 64 and queries > _MAX_QUERIES_OF_ONE_SUM else 1


def backward(
    problem: AttentionProblem, gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, for_query: bool,
    for_keys: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, which are made together; empty tensors for what nobody wants."""
    from nearpeak.kernels.attention.sm90 import attention_hopper_backward_kernel

    if not _is_tma_copyable(gradient):
        gradient = gradient.contiguous()
    heads = problem.batches * problem.heads
    pairs, blocks = triton.cdiv(problem.queries, _PAIR), triton.cdiv(problem.keys, _PAIR)
    padded = pairs * _PAIR
    logarithms, means = statistics(problem, gradient, lse.contiguous(), lse_gradient, addressable(result), padded)
    by_key, by_value = (
        problem.by_token(problem.batches, problem.keys, problem.key_heads, problem.dim) for _ in range(2)
    )
    tiles = (_tile_descriptor(x, _WARPGROUP_ROWS) for x in (problem.query, problem.key, problem.value, gradient))
    device = gradient.device
    number = sums_of(problem.dim, problem.queries)
    sums = torch.empty((number * heads * padded, problem.dim), dtype=torch.float32, device=device)
    turns = torch.zeros(heads * pairs * number, dtype=torch.int32, device=device)
    causal = problem.right == 0
    diagonal = _diagonal_offset(problem)
    launch(
        attention_hopper_backward_kernel, (blocks * problem.batches * problem.key_heads, 1, 1),
        logarithms, means, turns, _tile_descriptor(by_key, _WARPGROUP_ROWS), _tile_descriptor(by_value, _WARPGROUP_ROWS), *tiles,
        gluon.descriptor(sums, [_WARPGROUP_ROWS, problem.dim // 2]), problem.scale,
        problem.queries, problem.keys, problem.heads, problem.group, pairs, blocks, diagonal, heads * padded,
        processors(device), problem.dim, causal, blocks <= processors(device), number,
        warps=4, registers=168,
    )  # fmt: skip
    nothing = gradient.new_empty(0)
    if not for_keys:
        by_key = by_value = nothing
    if not for_query:
        return nothing, by_key, by_value, nothing, nothing
    by_query = problem.by_token(problem.batches, problem.queries, problem.heads, problem.dim)
    launch(
        attention_sums_kernel, (pairs * (_PAIR // _SUM_ROWS) * heads, 1, 1), sums, by_query, *by_query.stride()[:3],
        problem.scale, problem.heads, problem.queries, padded, blocks, diagonal, heads * padded * problem.dim,
        problem.dim, causal, number, _PAIR, _SUM_ROWS,
    )  # fmt: skip
    return by_query, by_key, by_value, nothing, nothing
