"""Attention for Hopper in Gluon: warp-specialized forward and backward kernels, and their launchers.

They support plain attention, full or causal, of 16-bit dtypes, with causal windows and sinks. The forward pass has
tiles for heads of up to 256 dimensions, in one or two parts of a power of 2 each: 192 columns are 128 and 64. TMA fills
columns that a head does not have with zeros. The backward pass has such tiles as far as registers and shared memory
allow. What may run by default is what was measured (`takes`).

Forward: one warp loads (producer), two or three warpgroups compute (consumers). The producer copies blocks of keys and
values into a ring buffer in shared memory by TMA. Each consumer has 64 queries. While it computes the exponentials of
one block of scores, the tensor cores multiply the weights of the previous block by its values, and the queries by the
next keys. Blocks that need a mask are the first of a tile, and have a loop of their own. A persistent program starts
the first scores of its next tile before it writes the results of the current one. Tiles with the most keys come first,
and every other round of programs goes through them backwards, so that all programs end at about the same time.

Backward: all gradients from one pass over the scores. A program has 128 keys and values, 64 for each of two consumers,
and loops over the queries that see them, in pairs of blocks of 64. Scores are transposed (keys, queries), so that
weights P^T and their gradients dS^T are directly the left operands of dV += P^T dO and dK += dS^T Q, which stay in
registers to the end. Every program contributes to dQ: a fourth warp adds its parts in global memory, in float32 and in
a fixed order, so that results are bitwise reproducible. For each pair of blocks of queries a counter says how many
parts have been added. A pair may have several partial sums, which are added up at the end, so that programs wait less.
The order in which programs visit queries, and the order of the additions, are such that programs of one head are rarely
at the same queries, and that the turn of each comes when the program before it has passed:

- Without a causal mask, programs start at different queries and wrap around.
- With a causal mask, programs that start together begin at their diagonal and go to later queries. If one head occupies
  all processors, its programs end one after the other, and those of the next head start, the ones with the most queries
  first: they go from the last queries to their diagonal. These end together, and so on.
- If a head has more programs than run at a time, a program may wait only for programs that have started before it: the
  order is that of their numbers.
- The same holds if the programs of several heads alternate, those with the most queries of all heads first. Then the
  last programs are short, and end at about the same time (`heads_together`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nearpeak.kernels._runtime.gluon import descriptor
from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.sm90_layouts import wgmma_layout
from nearpeak.kernels._runtime.tuning import processors
from nearpeak.kernels.attention.fp8_triton import Fp8Inputs
from nearpeak.kernels.attention.triton import AttentionProblem, Gradients, addressable, sinks_backward, statistics
from nearpeak.kernels.attention.tuning import (
    FP8_DIMS,
    MAX_SUMS,
    has_sm90_backward,
    has_sm90_tiles,
    heads_together,
    query_gradient_sums,
    sm90_backward_dims,
    sm90_config,
    sm90_fp8_tiles,
    sm90_tiles,
    tile_dim,
)

_MEASURED_BACKWARD = {(64, 64), (80, 80), (96, 96), (128, 128), (192, 128)}
"""Dimensions of keys and values for which the backward pass was measured on a GPU."""
_MEASURED = {*_MEASURED_BACKWARD, (192, 192), (256, 256)}
_MEASURED_WINDOWS = {(64, 64), (128, 128)}
_MEASURED_BACKWARD_WINDOWS = {(64, 64), (80, 80), (128, 128)}
_MEASURED_SINKS = {(64, 64)}
_OVERLAPPED_DIMS = (64, 128)
"""Columns of tiles for which the backward pass has registers and shared memory to start the next scores early."""
_PAIR = 128
"""Queries of a pair of blocks of the backward pass, and keys of one of its programs."""
_WARPGROUP_ROWS = 64
_SUM_ROWS = 32
_MAX_WINDOW = 2**29
"""More than any number of tokens, so that no sum of positions overflows."""
_TMA_ALIGNMENT = 16
_TMA_COLUMNS = 8
"""Rows of results have a multiple of so many numbers: they must begin at multiples of 16 bytes."""

ROWS = gl.constexpr(_WARPGROUP_ROWS)
"""Queries of a consumer, as many as its products have rows."""
PAIR = gl.constexpr(_PAIR)
BYTES = gl.constexpr(2)
"""Of a number of 16 bits."""
FP8_SHIFT = gl.constexpr(8.0)
"""A weight of 1 is 2 ** 8, near the largest number of e4m3, so that small ones have all their bits."""
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


def takes(problem: AttentionProblem, *, backward: bool = False) -> bool:
    """Whether a pass of a problem may run: whether it can, and was measured on a GPU for heads of these sizes."""
    dims, windowed = (problem.dim, problem.value_dim), problem.left >= 0
    if problem.sinks is not None and dims not in _MEASURED_SINKS:
        return False
    if backward:
        return dims in (_MEASURED_BACKWARD_WINDOWS if windowed else _MEASURED_BACKWARD) and supports_backward(problem)
    return dims in (_MEASURED_WINDOWS if windowed else _MEASURED) and supports(problem)


def supports(problem: AttentionProblem) -> bool:
    """Whether the forward pass of a problem can be run."""
    return (
        problem.query.dtype in (torch.bfloat16, torch.float16)
        and has_sm90_tiles(problem.dim, problem.value_dim)
        and problem.dim % _TMA_COLUMNS == 0
        and problem.value_dim % _TMA_COLUMNS == 0
        and problem.is_plain
        and not problem.packed
        and problem.dropout == 0.0
        and (problem.left < 0 or problem.right == 0)
        and problem.left < _MAX_WINDOW
        and problem.right in (-1, 0)
        and 0 not in (problem.batches, problem.queries, problem.keys)
        and problem.batches * problem.heads * (problem.queries + _PAIR) * MAX_SUMS < 2**31
        and all(map(_is_tma_copyable, (problem.query, problem.key, problem.value)))
    )


def supports_fp8(problem: AttentionProblem) -> bool:
    """Whether the forward pass of a problem can be run with operands in 8 bits, which are made from those of 16."""
    return (
        supports(problem)
        and problem.dim == problem.value_dim
        and problem.dim in FP8_DIMS
        and problem.left < 0
        and problem.sinks is None
    )


def supports_backward(problem: AttentionProblem) -> bool:
    """Whether the backward pass of a problem can be run."""
    return supports(problem) and has_sm90_backward(problem.dim, problem.value_dim)


def _is_tma_copyable(x: Tensor) -> bool:
    """Whether TMA can copy tiles of a tensor [batch, heads, tokens, dim]."""
    by_stride = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return (
        x.stride(-1) == 1
        and x.data_ptr() % _TMA_ALIGNMENT == 0
        and all(
            stride > 0 and stride * x.element_size() % _TMA_ALIGNMENT == 0 for size, stride in by_stride if size > 1
        )
    )


def _part_descriptors(x: Tensor, rows: int, dim: int) -> tuple[Any, Any]:
    """Descriptors of tiles of some tokens of one head: of their first part and, if there are two, the second."""
    parts = [_tile_descriptor(x, rows, part_dim(dim, part)) for part in range(part_count(dim))]
    return parts[0], parts[1] if len(parts) == 2 else None


def _tile_descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """The descriptor of tiles of some tokens of one head and some columns. Columns beyond the last are 0."""
    block = [1, 1, rows, columns]
    if 1 in x.shape[:-1]:  # the stride of a dimension of size 1 is arbitrary, and must still be a multiple of 16 bytes
        strides = [x.stride(-1) * x.shape[-1] if n == 1 else s for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
        x = torch.as_strided(x, x.shape, (*strides, 1))
    return descriptor(x, block)


def _diagonal_offset(problem: AttentionProblem) -> int:
    """Query i is aligned with key i + diagonal."""
    return problem.keys - problem.queries if problem.bottom_right else 0


@gluon.constexpr_function
def part_count(dim):
    """How many parts the columns of a tile have: one if they are a power of 2, or else two."""
    return 1 if dim & (dim - 1) == 0 else 2


@gluon.constexpr_function
def part_dim(dim, part):
    """The columns of a part of a tile, a power of 2."""
    first = 1 << (dim.bit_length() - 1)
    return first if part == 0 else dim - first


@gluon.jit
def in_parts(first, rest, DIM: gl.constexpr):
    """A tuple of what there is for each part of DIM columns."""
    parts = (first,)
    if part_count(DIM) == 2:
        parts = (first, rest)  # type: ignore[assignment]
    return parts


@gluon.jit
def _tiles(count: gl.constexpr, rows: gl.constexpr, parts, dtype: gl.constexpr, DIM: gl.constexpr):
    """Shared memory for some tiles of DIM columns, for each part in the layout of its descriptor."""
    tiles = (gl.allocate_shared_memory(dtype, [count, 1, 1, rows, part_dim(DIM, 0)], parts[0].layout),)
    if part_count(DIM) == 2:
        tiles = (tiles[0], gl.allocate_shared_memory(dtype, [count, 1, 1, rows, part_dim(DIM, 1)], parts[1].layout))  # type: ignore[assignment]
    return tiles


@gluon.jit
def _value_tiles(count: gl.constexpr, keys: gl.constexpr, parts, dtype: gl.constexpr, DIM: gl.constexpr):
    """The same for values. Those of 8 bits are transposed: (DIM, keys)."""
    if dtype.primitive_bitwidth == 8:
        tiles = (gl.allocate_shared_memory(dtype, [count, 1, 1, DIM, keys], parts[0].layout),)
    else:
        tiles = _tiles(count, keys, parts, dtype, DIM)
    return tiles


@gluon.jit
def tile_of_round(number, SNAKE: gl.constexpr):
    """The tile of this program in a round; with SNAKE, every other round goes backwards."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SNAKE:
        program = gl.where(number % 2 == 0, program, programs - 1 - program)
    return number * programs + program


@gluon.jit
def round_count(tiles, SNAKE: gl.constexpr):
    """The number of tiles of this program."""
    whole = tiles // gl.num_programs(0)
    return whole + gl.where(tile_of_round(whole, SNAKE) < tiles, 1, 0)


@gluon.jit
def block_and_head(tile, blocks, together, CAUSAL: gl.constexpr):
    """The block of queries of a tile, and its head among those of all batches.

    Tiles of `together` heads are next to each other, few enough for their keys and values to stay in the L2 cache.
    """
    rest = tile % (blocks * together)
    block = rest // together
    if CAUSAL:
        block = blocks - 1 - block
    return block, tile // (blocks * together) * together + rest % together


@gluon.jit
def key_blocks(first, keys, diagonal, QUERIES: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys QUERIES queries from `first` on see, at least one, and how many of them need no mask."""
    visible = gl.cdiv(keys, KEYS)
    full = keys // KEYS
    if CAUSAL:
        visible = gl.minimum(visible, gl.cdiv(gl.maximum(first + QUERIES + diagonal, 0), KEYS))
        full = gl.minimum(full, gl.maximum(first + diagonal + 1, 0) // KEYS)
    visible = gl.maximum(visible, 1)
    return visible, gl.minimum(full, visible)


@gluon.jit
def first_key_block(first, visible, diagonal, left, KEYS: gl.constexpr, WINDOWED: gl.constexpr):
    """The first block of keys that queries from `first` on see, of so many; with a window, not all see all of it."""
    block = 0
    if WINDOWED:
        block = gl.minimum(gl.maximum(first + diagonal - left, 0) // KEYS, visible - 1)
    return block


@gluon.jit
def _copy_parts(parts, batch, head, row, barrier, rings, slot, DIM: gl.constexpr):
    """Starts to copy the columns of a tile into a slot, those of each part into its ring."""
    for part in gl.static_range(part_count(DIM)):
        place = [batch, head, row, part * part_dim(DIM, 0)]
        tma.async_copy_global_to_shared(parts[part], place, barrier, rings[part].index(slot))


@gluon.jit
def _load_forward(
    query, key, value, rings, barriers, sizes, QUERIES: gl.constexpr, KEYS: gl.constexpr, CONSUMERS: gl.constexpr,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """The producer: copies the queries of each tile, and its keys and values, the last blocks first."""
    query_rings, key_rings, value_rings, _result_tiles = rings
    _queries, keys, heads, group, blocks, tiles, together, diagonal, left = sizes
    query_full, query_empty, key_full, key_empty, value_full, value_empty = barriers
    size: gl.constexpr = query_rings[0].dtype.primitive_bitwidth // 8
    count = 0  # blocks of keys so far, of all tiles
    for number in range(round_count(tiles, SNAKE)):
        block, head_index = block_and_head(tile_of_round(number, SNAKE), blocks, together, CAUSAL)
        batch = head_index // heads
        head = head_index % heads
        visible, _full = key_blocks(block * QUERIES, keys, diagonal, QUERIES, KEYS, CAUSAL)
        begin = first_key_block(block * QUERIES, visible, diagonal, left, KEYS, WINDOWED)
        # queries, one tile for each consumer
        mbarrier.wait(query_empty, (number & 1) ^ 1)
        mbarrier.expect(query_full, QUERIES * DIM * size)
        for consumer in gl.static_range(CONSUMERS):
            row = block * QUERIES + consumer * ROWS
            _copy_parts(query, batch, head, row, query_full, query_rings, consumer, DIM)
        # keys and values, as slots of the rings become empty
        for step in range(visible - begin):
            row = (visible - 1 - step) * KEYS
            slot = count % KEY_STAGES
            mbarrier.wait(key_empty.index(slot), ((count // KEY_STAGES) & 1) ^ 1)
            mbarrier.expect(key_full.index(slot), KEYS * DIM * size)
            _copy_parts(key, batch, head // group, row, key_full.index(slot), key_rings, slot, DIM)
            slot = count % VALUE_STAGES
            mbarrier.wait(value_empty.index(slot), ((count // VALUE_STAGES) & 1) ^ 1)
            mbarrier.expect(value_full.index(slot), KEYS * VALUE_DIM * size)
            if size == 1:
                place = [batch, head // group, 0, row]
                tma.async_copy_global_to_shared(value[0], place, value_full.index(slot), value_rings[0].index(slot))
            else:
                _copy_parts(value, batch, head // group, row, value_full.index(slot), value_rings, slot, VALUE_DIM)
            count += 1


@gluon.jit
def _softmax_weights(
    scores, maximum, total, factor, first, column, keys, diagonal, left,
    KEYS: gl.constexpr, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Online softmax of scores (ROWS, KEYS): weights, new maximum, new total, and the factor of earlier results.

    Weights and totals of 8 bits are FP8_SHIFT powers of 2 larger.
    """
    if MASKED:
        key_index = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        query_index = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        end = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, LAYOUT)) + (keys - column)
        if CAUSAL:
            end = gl.minimum(end, query_index + (first + diagonal + 1 - column))
        scores = gl.where(key_index[None, :] < end[:, None], scores, -float("inf"))
        if WINDOWED:
            start = query_index + (first + diagonal - left - column)
            scores = gl.where(key_index[None, :] >= start[:, None], scores, -float("inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * factor)  # (ROWS,)
    base = new_maximum
    if MASKED:  # a query that has seen no key yet
        base = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    rescale = gl.exp2(maximum - base)
    if FP8:
        base = base - FP8_SHIFT
    weights = gl.exp2(scores * factor - base[:, None])
    return weights, new_maximum, total * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _as_left_operand(weights, KEYS: gl.constexpr):
    """Weights (ROWS, KEYS) of 8 bits in the order of keys that makes each thread's four columns those that it needs.

    Of 16 columns of scores, a thread has two of the first and two of the last 8. As the left operand of a product of 8
    bits they are four in a row. Values are stored in this order of keys.
    """
    return weights.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])


@gluon.jit
def _packed(weights, KEYS: gl.constexpr, dtype: gl.constexpr):
    """Weights (ROWS, KEYS) in 16 or 8 bits, two or four in a register. A loop would carry one, and repack them."""
    even, odd = weights.reshape([ROWS, KEYS // 2, 2]).split()
    if dtype.primitive_bitwidth == 8:
        first, third = even.reshape([ROWS, KEYS // 4, 2]).split()
        second, fourth = odd.reshape([ROWS, KEYS // 4, 2]).split()
        four: gl.constexpr = (
            "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            " mov.b32 $0, {a, b};}"
        )
        packed = gl.inline_asm_elementwise(
            four, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        two: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
        packed = gl.inline_asm_elementwise(two, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return packed


@gluon.jit
def _unpacked(packed, KEYS: gl.constexpr, DIM: gl.constexpr, dtype: gl.constexpr):
    """Packed weights as the left operand of a product with values."""
    bits: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(DIM, bits), k_width=32 // bits)
    if bits == 8:
        # each register four times, next to each other as this layout has them: an instruction takes all, and reads one
        pairs = gl.join(packed, packed)
        fours = gl.convert_layout(gl.join(pairs, pairs).reshape([ROWS, KEYS]), layout)
        asm: gl.constexpr = "mov.b32 $0, $1;"
        whole = gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [fours], dtype=gl.int8, is_pure=True, pack=4)
    else:
        halves: gl.constexpr = "mov.b32 {$0, $1}, $2;"
        even, odd = gl.inline_asm_elementwise(halves, "=h,=h,r", [packed], (gl.int16, gl.int16), is_pure=True, pack=1)
        whole = gl.join(even, odd).reshape([ROWS, KEYS])
    return gl.convert_layout(whole.to(dtype, bitcast=True), layout)


@gluon.jit
def _zero_sums(DIM: gl.constexpr, BITS: gl.constexpr = 16):
    """Zeros (ROWS, DIM) in one or two parts, for products of operands of so many bits."""
    sums = (gl.zeros([ROWS, part_dim(DIM, 0)], gl.float32, layout=wgmma_layout(part_dim(DIM, 0), BITS)),)
    if part_count(DIM) == 2:
        rest = gl.zeros([ROWS, part_dim(DIM, 1)], gl.float32, layout=wgmma_layout(part_dim(DIM, 1), BITS))
        sums = (sums[0], rest)  # type: ignore[assignment]
    return sums


@gluon.jit
def _start_scores(
    query_rings, key_rings, slot, CONSUMER: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr
):
    """Starts S = Q K^T, (ROWS, KEYS)."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=LAYOUT)
    for part in gl.static_range(part_count(DIM)):
        q = query_rings[part].index(CONSUMER).reshape([ROWS, part_dim(DIM, part)])
        k = key_rings[part].index(slot).reshape([KEYS, part_dim(DIM, part)]).permute((1, 0))
        scores = warpgroup_mma(q, k, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _start_results(weights, value_rings, slot, accumulators, KEYS: gl.constexpr, VALUE_DIM: gl.constexpr):
    """Starts O += P V, (ROWS, part_dim(VALUE_DIM, 0)) and, if there are two parts, (ROWS, part_dim(VALUE_DIM, 1))."""
    left = _unpacked(weights, KEYS, part_dim(VALUE_DIM, 0), value_rings[0].dtype)
    if value_rings[0].dtype.primitive_bitwidth == 8:
        v = value_rings[0].index(slot).reshape([VALUE_DIM, KEYS]).permute((1, 0))
    else:
        v = value_rings[0].index(slot).reshape([KEYS, part_dim(VALUE_DIM, 0)])
    products = (warpgroup_mma(left, v, accumulators[0], is_async=True),)
    if part_count(VALUE_DIM) == 2:
        left = _unpacked(weights, KEYS, part_dim(VALUE_DIM, 1), value_rings[0].dtype)
        v = value_rings[1].index(slot).reshape([KEYS, part_dim(VALUE_DIM, 1)])
        products = (products[0], warpgroup_mma(left, v, accumulators[1], is_async=True))  # type: ignore[assignment]
    return products


@gluon.jit
def _wait_for_results(products, in_flight: gl.constexpr, VALUE_DIM: gl.constexpr):
    """The accumulators when no more than so many later products are in flight."""
    accumulators = warpgroup_mma_wait(num_outstanding=in_flight, deps=products)
    if part_count(VALUE_DIM) == 1:
        accumulators = (accumulators,)
    return accumulators


@gluon.jit
def _scaled(accumulators, factors, VALUE_DIM: gl.constexpr, BITS: gl.constexpr):
    """The rows of accumulators times their factors."""
    by_row: gl.constexpr = gl.SliceLayout(1, wgmma_layout(part_dim(VALUE_DIM, 0), BITS))
    scaled = (accumulators[0] * gl.convert_layout(factors, by_row)[:, None],)
    if part_count(VALUE_DIM) == 2:
        by_row_too: gl.constexpr = gl.SliceLayout(1, wgmma_layout(part_dim(VALUE_DIM, 1), BITS))
        scaled = (scaled[0], accumulators[1] * gl.convert_layout(factors, by_row_too)[:, None])  # type: ignore[assignment]
    return scaled


@gluon.jit
def _forward_step(
    rings, barriers, weights, accumulators, maximum, total, factor, last, count, first, column, keys, diagonal, left,
    CONSUMER: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Starts the scores of this block and O += P V of the previous one, and computes the weights of this one."""
    query_rings, key_rings, value_rings, _result_tiles = rings
    _query_full, query_empty, key_full, key_empty, value_full, value_empty = barriers
    dtype: gl.constexpr = value_rings[0].dtype
    layout: gl.constexpr = wgmma_layout(KEYS, dtype.primitive_bitwidth)
    fp8: gl.constexpr = dtype.primitive_bitwidth == 8
    slot = count % KEY_STAGES
    previous = (count - 1) % VALUE_STAGES
    # both products are in flight
    mbarrier.wait(key_full.index(slot), (count // KEY_STAGES) & 1)
    scores = _start_scores(query_rings, key_rings, slot, CONSUMER, KEYS, DIM, layout)
    mbarrier.wait(value_full.index(previous), ((count - 1) // VALUE_STAGES) & 1)
    products = _start_results(weights, value_rings, previous, accumulators, KEYS, VALUE_DIM)
    # softmax of the scores, while the second product runs
    scores = warpgroup_mma_wait(num_outstanding=part_count(VALUE_DIM), deps=(scores,))
    mbarrier.arrive(key_empty.index(slot), count=1)
    mbarrier.arrive(query_empty, count=1, pred=last)
    new_weights, maximum, total, rescale = _softmax_weights(
        scores,
        maximum,
        total,
        factor,
        first,
        column,
        keys,
        diagonal,
        left,
        KEYS,
        layout,
        CAUSAL,
        WINDOWED,
        MASKED,
        fp8,
    )
    accumulators = _wait_for_results(products, 0, VALUE_DIM)
    mbarrier.arrive(value_empty.index(previous), count=1)
    accumulators = _scaled(accumulators, rescale, VALUE_DIM, dtype.primitive_bitwidth)
    if fp8:
        new_weights = _as_left_operand(new_weights, KEYS)
    return _packed(new_weights, KEYS, dtype), accumulators, maximum, total


@gluon.jit
def _release_blocks(count, number, barriers, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr):
    """Releases the next blocks, which only other consumers see."""
    _query_full, _query_empty, key_full, key_empty, value_full, value_empty = barriers
    for _ in range(number):
        slot = count % KEY_STAGES
        mbarrier.wait(key_full.index(slot), (count // KEY_STAGES) & 1)
        mbarrier.arrive(key_empty.index(slot), count=1)
        slot = count % VALUE_STAGES
        mbarrier.wait(value_full.index(slot), (count // VALUE_STAGES) & 1)
        mbarrier.arrive(value_empty.index(slot), count=1)
        count += 1
    return count


@gluon.jit
def _skip_hidden_blocks(
    count, tile, sizes, barriers, CONSUMER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    """Releases the first blocks of a tile, which only later queries of other consumers see."""
    _queries, keys, _heads, _group, blocks, _tiles, together, diagonal, _left = sizes
    block, _head_index = block_and_head(tile, blocks, together, True)
    visible, _full = key_blocks(block * QUERIES, keys, diagonal, QUERIES, KEYS, True)
    own, _full = key_blocks(block * QUERIES + CONSUMER * ROWS, keys, diagonal, ROWS, KEYS, True)
    return _release_blocks(count, visible - own, barriers, KEY_STAGES, VALUE_STAGES)


@gluon.jit
def _columns(x, WIDTH: gl.constexpr, STORED: gl.constexpr):
    """A tile (ROWS, WIDTH) as a tuple of tiles of at most STORED columns. No value changes its thread."""
    if WIDTH <= STORED:
        pieces = (x,)
    else:
        left, right = x.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)).split()
        pieces = _columns(left, WIDTH // 2, STORED) + _columns(right, WIDTH // 2, STORED)
    return pieces


@gluon.jit
def _store_part(result, batch, head, row, column, x, tile, WIDTH: gl.constexpr, STORED: gl.constexpr):
    """Starts to store (ROWS, WIDTH) results from a column on, STORED at a time through a tile in shared memory."""
    pieces = _columns(x, WIDTH, STORED)
    for piece in gl.static_range(len(pieces)):
        tma.store_wait(0)
        gl.thread_barrier()  # one thread waits for the copy of what was there, and all write
        if WIDTH < STORED:  # what else is in the tile is beyond the end of a row, and not stored
            tile.slice(0, WIDTH, dim=1).store(pieces[piece])
        else:
            tile.store(pieces[piece])
        fence_async_shared()
        place = [batch, head, row, column + piece * STORED]
        tma.async_copy_shared_to_global(result, place, tile.reshape([1, 1, ROWS, STORED]))


@gluon.jit
def _consume_forward(
    CONSUMER: gl.constexpr, result, lse, sinks, scales, rings, barriers, exp2_scale, sizes, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr, STORED: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    SINKS: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """A consumer: results and log-sum-exp of 64 queries of each tile."""
    query_rings, key_rings, value_rings, result_tiles = rings
    queries, keys, heads, group, blocks, tiles, together, diagonal, left = sizes
    query_scales, key_scales, value_scales = scales
    query_full, query_empty, key_full, key_empty, value_full, value_empty = barriers
    dtype: gl.constexpr = value_rings[0].dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = wgmma_layout(KEYS, bits)
    rounds = round_count(tiles, SNAKE)
    # the first scores of the first tile
    mbarrier.wait(query_full, 0)
    count = 0
    if CAUSAL:
        count = _skip_hidden_blocks(
            count, tile_of_round(0, SNAKE), sizes, barriers, CONSUMER, QUERIES, KEYS, KEY_STAGES, VALUE_STAGES
        )
    mbarrier.wait(key_full.index(count % KEY_STAGES), (count // KEY_STAGES) & 1)
    next_scores = _start_scores(query_rings, key_rings, count % KEY_STAGES, CONSUMER, KEYS, DIM, layout)
    for number in range(rounds):
        block, head_index = block_and_head(tile_of_round(number, SNAKE), blocks, together, CAUSAL)
        first = block * QUERIES + CONSUMER * ROWS
        visible, full = key_blocks(first, keys, diagonal, ROWS, KEYS, CAUSAL)
        begin = first_key_block(first, visible, diagonal, left, KEYS, WINDOWED)
        steps = visible - begin
        seen_by_all = 0  # the first block of which all queries see the first key
        if WINDOWED:
            seen_by_all = gl.minimum(gl.cdiv(gl.maximum(first + ROWS - 1 + diagonal - left, 0), KEYS), visible)
        maximum = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
        total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, layout))
        if SINKS:  # a key without a value
            sink = gl.load(sinks + head_index % heads).to(gl.float32) * LOG2_E
            maximum = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, layout)) + sink
            total = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, layout))
        accumulators = _zero_sums(VALUE_DIM, bits)
        factor = exp2_scale
        if bits == 8:
            factor = exp2_scale * gl.load(query_scales + head_index) * gl.load(key_scales + head_index // group)

        # the weights of the first block, which is the last of the keys
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(next_scores,))
        mbarrier.arrive(key_empty.index(count % KEY_STAGES), count=1)
        mbarrier.arrive(query_empty, count=1, pred=steps == 1)
        column = (visible - 1) * KEYS
        masked = visible > full
        if WINDOWED:
            masked = masked | (seen_by_all == visible)
        if masked:
            new_weights, maximum, total, _rescale = _softmax_weights(
                scores,
                maximum,
                total,
                factor,
                first,
                column,
                keys,
                diagonal,
                left,
                KEYS,
                layout,
                CAUSAL,
                WINDOWED,
                True,
                bits == 8,
            )
        else:
            new_weights, maximum, total, _rescale = _softmax_weights(
                scores,
                maximum,
                total,
                factor,
                first,
                column,
                keys,
                diagonal,
                left,
                KEYS,
                layout,
                CAUSAL,
                WINDOWED,
                False,
                bits == 8,
            )
        if bits == 8:
            new_weights = _as_left_operand(new_weights, KEYS)
        weights = _packed(new_weights, KEYS, dtype)
        count += 1

        # blocks that need a mask, those that do not, and those at the other end of a window
        for step in range(1, gl.minimum(visible - full, steps)):
            weights, accumulators, maximum, total = _forward_step(
                rings, barriers, weights, accumulators, maximum, total, factor, step == steps - 1, count, first,
                column - step * KEYS, keys, diagonal, left, CONSUMER, KEYS, DIM, VALUE_DIM, KEY_STAGES, VALUE_STAGES,
                CAUSAL, WINDOWED, True,
            )  # fmt: skip
            count += 1
        for step in range(gl.maximum(visible - full, 1), gl.minimum(visible - seen_by_all, steps)):
            weights, accumulators, maximum, total = _forward_step(
                rings, barriers, weights, accumulators, maximum, total, factor, step == steps - 1, count, first,
                column - step * KEYS, keys, diagonal, left, CONSUMER, KEYS, DIM, VALUE_DIM, KEY_STAGES, VALUE_STAGES,
                CAUSAL, WINDOWED, False,
            )  # fmt: skip
            count += 1
        if WINDOWED:
            for step in range(gl.maximum(visible - gl.minimum(full, seen_by_all), 1), steps):
                weights, accumulators, maximum, total = _forward_step(
                    rings, barriers, weights, accumulators, maximum, total, factor, step == steps - 1, count, first,
                    column - step * KEYS, keys, diagonal, left, CONSUMER, KEYS, DIM, VALUE_DIM, KEY_STAGES,
                    VALUE_STAGES, CAUSAL, WINDOWED, True,
                )  # fmt: skip
                count += 1

        # O += P V of the last block
        last = (count - 1) % VALUE_STAGES
        mbarrier.wait(value_full.index(last), ((count - 1) // VALUE_STAGES) & 1)
        products = _start_results(weights, value_rings, last, accumulators, KEYS, VALUE_DIM)
        if WINDOWED:  # blocks that only earlier queries see may need the place of the last one
            accumulators = _wait_for_results(products, 0, VALUE_DIM)
            mbarrier.arrive(value_empty.index(last), count=1)
            of_tile, _full = key_blocks(block * QUERIES, keys, diagonal, QUERIES, KEYS, CAUSAL)
            behind = begin - first_key_block(block * QUERIES, of_tile, diagonal, left, KEYS, WINDOWED)
            count = _release_blocks(count, behind, barriers, KEY_STAGES, VALUE_STAGES)
        # the first scores of the next tile; after the last tile they are garbage, and nobody waits for their keys
        more = number + 1 < rounds
        if CAUSAL and more:
            count = _skip_hidden_blocks(
                count, tile_of_round(number + 1, SNAKE), sizes, barriers, CONSUMER, QUERIES, KEYS, KEY_STAGES,
                VALUE_STAGES,
            )  # fmt: skip
        mbarrier.wait(query_full, (number + 1) & 1, pred=more)
        mbarrier.wait(key_full.index(count % KEY_STAGES), (count // KEY_STAGES) & 1, pred=more)
        next_scores = _start_scores(query_rings, key_rings, count % KEY_STAGES, CONSUMER, KEYS, DIM, layout)
        if not WINDOWED:
            accumulators = _wait_for_results(products, part_count(DIM), VALUE_DIM)
            mbarrier.arrive(value_empty.index(last), count=1)

        # normalize and store, the result through shared memory
        inverse = gl.where(total == 0.0, 0.0, 1.0 / total)  # a query that sees no key has zeros
        if bits == 8:
            inverse = inverse * gl.load(value_scales + head_index // group)
        accumulators = _scaled(accumulators, inverse, VALUE_DIM, bits)
        for part in gl.static_range(part_count(VALUE_DIM)):
            _store_part(
                result, head_index // heads, head_index % heads, first, part * part_dim(VALUE_DIM, 0),
                accumulators[part].to(result.dtype), result_tiles.index(CONSUMER), part_dim(VALUE_DIM, part), STORED,
            )  # fmt: skip
        index = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        if bits == 8:
            maximum = maximum - FP8_SHIFT
        log_sum_exp = gl.where(total == 0.0, -float("inf"), (maximum + gl.log2(total)) * LN_2)
        gl.store(lse + head_index.to(gl.int64) * queries + index, log_sum_exp, mask=index < queries)
    warpgroup_mma_wait(num_outstanding=0, deps=(next_scores,))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "blocks", "tiles", "together", "diagonal", "left"])
def attention_sm90_kernel(
    lse, query, key, value, result, query_rest, key_rest, value_rest, sinks,
    query_scales, key_scales, value_scales, factor,
    queries, keys, heads, group, blocks, tiles, together, diagonal, left,
    KEYS: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, CONSUMERS: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, STORED: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """The forward pass. Tensors are descriptors of [batch, heads, tokens, dim], except lse, [batch, heads, queries].

    Tiles have DIM or VALUE_DIM columns, in one or two parts. The descriptors `rest` are for the second part, or None.
    Operands of 8 bits have scales, [batch, heads] each, and values that are transposed, [batch, heads, dim, tokens].
    """
    dtype: gl.constexpr = query.dtype
    QUERIES: gl.constexpr = CONSUMERS * ROWS
    # tiles in shared memory
    query_parts = in_parts(query, query_rest, DIM)
    key_parts = in_parts(key, key_rest, DIM)
    value_parts = in_parts(value, value_rest, VALUE_DIM)
    query_rings = _tiles(CONSUMERS, ROWS, query_parts, dtype, DIM)
    key_rings = _tiles(KEY_STAGES, KEYS, key_parts, dtype, DIM)
    value_rings = _value_tiles(VALUE_STAGES, KEYS, value_parts, dtype, VALUE_DIM)
    result_tiles = gl.allocate_shared_memory(
        result.dtype, [CONSUMERS, ROWS, STORED], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    # full: the producer's copy has arrived; empty: all consumers have read it
    query_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    query_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    key_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full, count=1)
    mbarrier.init(query_empty, count=CONSUMERS)
    for slot in gl.static_range(KEY_STAGES):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_empty.index(slot), count=CONSUMERS)
    for slot in gl.static_range(VALUE_STAGES):
        mbarrier.init(value_full.index(slot), count=1)
        mbarrier.init(value_empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    barriers = (query_full, query_empty, key_full, key_empty, value_full, value_empty)
    rings = (query_rings, key_rings, value_rings, result_tiles)
    scales = (query_scales, key_scales, value_scales)
    sizes = (queries, keys, heads, group, blocks, tiles, together, diagonal, left)
    # Gluon does not compile a list of partitions that is composed
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume_forward,
                    (
                        0, result, lse, sinks, scales, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, VALUE_DIM,
                        KEY_STAGES, VALUE_STAGES, STORED, CAUSAL, WINDOWED, SINKS, SNAKE,
                    ),
                ),
                (
                    _consume_forward,
                    (
                        1, result, lse, sinks, scales, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, VALUE_DIM,
                        KEY_STAGES, VALUE_STAGES, STORED, CAUSAL, WINDOWED, SINKS, SNAKE,
                    ),
                ),
                (
                    _load_forward,
                    (
                        query_parts, key_parts, value_parts, rings, barriers, sizes, QUERIES, KEYS, CONSUMERS,
                        DIM, VALUE_DIM, KEY_STAGES, VALUE_STAGES, CAUSAL, WINDOWED, SNAKE,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume_forward,
                    (
                        0, result, lse, sinks, scales, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, VALUE_DIM,
                        KEY_STAGES, VALUE_STAGES, STORED, CAUSAL, WINDOWED, SINKS, SNAKE,
                    ),
                ),
                (
                    _consume_forward,
                    (
                        1, result, lse, sinks, scales, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, VALUE_DIM,
                        KEY_STAGES, VALUE_STAGES, STORED, CAUSAL, WINDOWED, SINKS, SNAKE,
                    ),
                ),
                (
                    _consume_forward,
                    (
                        2, result, lse, sinks, scales, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, VALUE_DIM,
                        KEY_STAGES, VALUE_STAGES, STORED, CAUSAL, WINDOWED, SINKS, SNAKE,
                    ),
                ),
                (
                    _load_forward,
                    (
                        query_parts, key_parts, value_parts, rings, barriers, sizes, QUERIES, KEYS, CONSUMERS,
                        DIM, VALUE_DIM, KEY_STAGES, VALUE_STAGES, CAUSAL, WINDOWED, SNAKE,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


def forward(problem: AttentionProblem, fp8: Fp8Inputs | None = None) -> tuple[Tensor, Tensor]:
    """The result, token-major in memory, and the log-sum-exp of the scores in float32. Operands may be in 8 bits."""
    result = problem.new_token_major(problem.batches, problem.queries, problem.heads, problem.value_dim)
    lse = problem.new_lse()
    causal = problem.right == 0
    device = problem.query.device
    dim, value_dim = tile_dim(problem.dim), tile_dim(problem.value_dim)
    config = sm90_config(dim, causal, problem.queries, problem.left, fp8 is not None, device)
    tiles_of = sm90_tiles(dim, value_dim, problem.left) if fp8 is None else sm90_fp8_tiles(dim)
    consumers = config.consumers
    blocks = triton.cdiv(problem.queries, consumers * _WARPGROUP_ROWS)
    heads = problem.batches * problem.heads
    tiles = blocks * heads
    programs = min(processors(device), tiles) if config.persistent else tiles
    scales: tuple[Tensor | None, ...] = (None, None, None)
    if fp8 is None:
        query, query_rest = _part_descriptors(problem.query, _WARPGROUP_ROWS, dim)
        key, key_rest = _part_descriptors(problem.key, tiles_of.keys, dim)
        value, value_rest = _part_descriptors(problem.value, tiles_of.keys, value_dim)
    else:
        query = _tile_descriptor(fp8.query, _WARPGROUP_ROWS, dim)
        key = _tile_descriptor(fp8.key, tiles_of.keys, dim)
        value = _tile_descriptor(fp8.value, value_dim, tiles_of.keys)
        query_rest = key_rest = value_rest = None
        scales = (fp8.query_scales, fp8.key_scales, fp8.value_scales)
    launch(
        attention_sm90_kernel, (programs, 1, 1), lse, query, key, value,
        _tile_descriptor(result, _WARPGROUP_ROWS, tiles_of.stored), query_rest, key_rest, value_rest,
        lse if problem.sinks is None else problem.sinks, *scales, problem.scale * math.log2(math.e),
        problem.queries, problem.keys, problem.heads, problem.group, blocks, tiles, math.gcd(config.together, heads),
        _diagonal_offset(problem), max(problem.left, 0),
        tiles_of.keys, dim, value_dim, consumers, tiles_of.key_stages, tiles_of.value_stages, tiles_of.stored,
        causal, problem.left >= 0, problem.sinks is not None, causal and config.persistent,
        warps=4, registers=168 if consumers == 2 else 128,
    )  # fmt: skip
    return result, lse


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Starts to add a tile in shared memory to one in global memory. Gluon has no function for it yet."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _wait_until_written():
    """Waits until this warp's copies are in global memory; `store_wait` waits until they have left shared memory."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keys_of_program(program, blocks, TOGETHER: gl.constexpr):
    """The block of keys of a program, and its head among those of all batches: blocks of TOGETHER heads alternate."""
    block = program % blocks
    head = program // blocks
    if TOGETHER > 1:
        rest = program % (blocks * TOGETHER)
        block = rest // TOGETHER
        head = program // (blocks * TOGETHER) * TOGETHER + rest % TOGETHER
    return block, head


@gluon.jit
def query_pairs(head, block, sizes, CAUSAL: gl.constexpr, ROTATED: gl.constexpr):
    """The first pair of blocks of queries that see a block of keys, their number, and whether the last come first."""
    _queries, _keys, _heads, _group, pairs, blocks, diagonal, _rows, processors, left = sizes
    first = 0
    count = pairs
    down = 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(block * PAIR - diagonal, 0) // PAIR, pairs)
        count = pairs - first
        if left is not None:
            last = gl.minimum(gl.maximum(block * PAIR + 2 * PAIR - 1 - diagonal + left, 0) // PAIR, pairs)
            count = gl.maximum(last - first, 0)
        down = 1
        if ROTATED:
            down = gl.where(2 * blocks > processors, head % 2, 0)
    elif ROTATED:
        first = block * pairs // blocks
    return first, count, down


@gluon.jit
def pair_of_step(step, first, count, down, pairs):
    """The pair of blocks of queries of a program in a step."""
    pair = first + (step if down == 0 else count - 1 - step)
    return pair - pairs if pair >= pairs else pair


@gluon.jit
def turn_of_pair(block, pair, down, sizes, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr):
    """The sum of a pair to which the part of a block of keys is added, and the number of parts added before it."""
    _queries, _keys, _heads, _group, pairs, blocks, diagonal, _rows, _processors, left = sizes
    before = block
    if left is not None:  # a pair does not see the first blocks
        before = block - gl.maximum(pair * PAIR + diagonal - left, 0) // PAIR
    if ROTATED:
        if CAUSAL:
            if down == 0:
                before = gl.minimum((pair * PAIR + PAIR - 1 + diagonal) // PAIR, blocks - 1) - block
        else:
            before = (((pair + 1) * blocks - 1) // pairs - block + blocks) % blocks
    return before % SUMS, before // SUMS


@gluon.jit
def add_query_gradients(
    sums, counters, dq_tiles, barriers, sizes, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
    SUMS: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The adding warp: adds the parts of dQ, each pair of blocks in its turn. The first part of a sum is stored."""
    _queries, _keys, _heads, group, pairs, blocks, _diagonal, rows, _processors, _left = sizes
    _keys_full, _full, _empty, ds_full, dq_empty = barriers
    block, head = keys_of_program(gl.program_id(0), blocks, TOGETHER)
    first, count, down = query_pairs(head, block, sizes, CAUSAL, ROTATED)
    # dQ of a pair is in shared memory when dS of the next pair is: the first dS announces nothing. Nothing is stored
    # before it was seen, so that this warp is never a whole phase of the barriers late
    for half in gl.static_range(2):
        mbarrier.wait(ds_full.index(half), 0, pred=group * count > 0)
        mbarrier.arrive(dq_empty.index(half), count=1, pred=group * count > 0)
    done = 0
    for member in range(group):
        for step in range(count):
            pair = pair_of_step(step, first, count, down, pairs)
            place = (head * group + member) * pairs + pair
            number, before = turn_of_pair(block, pair, down, sizes, CAUSAL, ROTATED, SUMS)
            counter = counters + place * SUMS + number
            for half in gl.static_range(2):
                row = number * rows + place * PAIR + half * ROWS
                mbarrier.wait(ds_full.index(half), (done + 1) & 1)
                # until it is this program's turn
                if half == 0:
                    added = gl.atomic_add(counter, 0, sem="relaxed")
                    while added < before:
                        added = gl.atomic_add(counter, 0, sem="relaxed")
                # both halves of the dimensions
                if before == 0:
                    tma.async_copy_shared_to_global(sums, [row, 0], dq_tiles.index(2 * half))
                    tma.async_copy_shared_to_global(sums, [row, DIM // 2], dq_tiles.index(2 * half + 1))
                else:
                    async_add_shared_to_global(sums, [row, 0], dq_tiles.index(2 * half))
                    async_add_shared_to_global(sums, [row, DIM // 2], dq_tiles.index(2 * half + 1))
                tma.store_wait(0)
                mbarrier.arrive(dq_empty.index(half), count=1)
            _wait_until_written()
            gl.atomic_add(counter, 1, sem="release")
            done += 1


@gluon.jit
def _load_backward(
    query, key, value, gradient, lse2, delta, tiles, barriers, sizes,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The producer: copies the keys and values of this program, and then queries, dO, lse and delta, block by block."""
    key_tiles, value_tiles, query_ring, gradient_ring, statistics_ring, _ds_tiles, _dq_tiles = tiles
    _queries, _keys, heads, group, pairs, blocks, _diagonal, _rows, _processors, _left = sizes
    keys_full, full, empty, _ds_full, _dq_empty = barriers
    key_heads = heads // group
    block, head_index = keys_of_program(gl.program_id(0), blocks, TOGETHER)
    batch = head_index // key_heads
    head = head_index % key_heads
    mbarrier.expect(keys_full, 2 * key.block_type.nbytes + 2 * value.block_type.nbytes)
    for half in gl.static_range(2):
        place = [batch, head, block * PAIR + half * ROWS, 0]
        tma.async_copy_global_to_shared(key, place, keys_full, key_tiles.index(half))
        tma.async_copy_global_to_shared(value, place, keys_full, value_tiles.index(half))
    first, count, down = query_pairs(head_index, block, sizes, CAUSAL, ROTATED)
    lanes = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    done = 0
    for member in range(group):
        for step in range(2 * count):
            pair = pair_of_step(step // 2, first, count, down, pairs)
            slot = done % STAGES
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), query.block_type.nbytes + gradient.block_type.nbytes)
            place = [batch, head * group + member, pair * PAIR + (step % 2) * ROWS, 0]
            tma.async_copy_global_to_shared(query, place, full.index(slot), query_ring.index(slot))
            tma.async_copy_global_to_shared(gradient, place, full.index(slot), gradient_ring.index(slot))
            row = (head_index * group + member).to(gl.int64) * (pairs * PAIR) + pair * PAIR + (step % 2) * ROWS
            lse2_rows = gl.load(lse2 + row + lanes)
            delta_rows = gl.load(delta + row + lanes)
            statistics_ring.index(2 * slot).store(lse2_rows)
            statistics_ring.index(2 * slot + 1).store(delta_rows)
            mbarrier.arrive(full.index(slot), count=1)
            done += 1


@gluon.jit
def _start_query_gradient(
    HALF: gl.constexpr, CONSUMER: gl.constexpr, ds_tiles, key_tiles, barriers, iteration, zero, DIM: gl.constexpr
):
    """Starts dQ = dS K of 64 queries and this consumer's half of the dimensions, (ROWS, DIM / 2)."""
    _keys_full, _full, _empty, ds_full, _dq_empty = barriers
    mbarrier.wait(ds_full.index(HALF), iteration & 1)
    d_q = gl.zeros([ROWS, DIM // 2], gl.float32, layout=wgmma_layout(DIM // 2))
    for part in gl.static_range(2):
        d_scores = ds_tiles.index(2 * HALF + part + zero).permute((1, 0))
        k = key_tiles.index(part + zero).reshape([ROWS, DIM]).slice(CONSUMER * (DIM // 2), DIM // 2, dim=1)
        d_q = warpgroup_mma(d_scores, k, d_q, use_acc=part == 1, is_async=True)
    return d_q


@gluon.jit
def _store_query_gradient(HALF: gl.constexpr, CONSUMER: gl.constexpr, d_q, dq_tiles, barriers, iteration):
    """Stores a part of dQ for the adding warp, to which a later barrier announces it."""
    _keys_full, _full, _empty, _ds_full, dq_empty = barriers
    mbarrier.wait(dq_empty.index(HALF), iteration & 1)
    dq_tiles.index(2 * HALF + CONSUMER).store(d_q)


@gluon.jit
def _start_products(left, right, half, DIM: gl.constexpr):
    """Starts the product of 64 keys (or values) with 64 queries (or dO), (ROWS, ROWS)."""
    columns = right.index(half).reshape([ROWS, DIM]).permute((1, 0))
    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout=wgmma_layout(64))
    return warpgroup_mma(left, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _left_operand(tiles, consumer, DIM: gl.constexpr):
    """The keys or values of a consumer as the left operand of products.

    Those of 64 dimensions fit into registers. Read from shared memory by each product, they would be a third of the
    traffic there, which would be the bottleneck.
    """
    operand = tiles.index(consumer).reshape([ROWS, DIM])
    if DIM == 64:
        operand = operand.load(gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(64), k_width=2))
    return operand


@gluon.jit
def _start_next_products(tiles, operands, consumer, half, DIM: gl.constexpr):
    """Starts S^T = K Q^T of the next 64 queries and, if there are registers for it, dP^T = V dO^T."""
    key_tiles, _value_tiles, query_ring, gradient_ring, _statistics_ring, _ds_tiles, _dq_tiles = tiles
    if DIM == 64:
        products = (
            _start_products(operands[0], query_ring, half, DIM),
            _start_products(operands[1], gradient_ring, half, DIM),
        )
    else:  # with addresses computed anew
        left = _left_operand(key_tiles, consumer, DIM)
        products = (_start_products(left, query_ring, half, DIM),)  # type: ignore[assignment]
    return products


@gluon.jit
def _backward_half(
    HALF: gl.constexpr, CONSUMER: gl.constexpr, next_products, operands, d_k, d_v, tiles, barriers,
    row, iteration, more, masked, factor, first, keys, diagonal, window,
    dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Adds 64 queries to dK and dV, and stores dQ of the previous 64.

    Their scores are in flight when it begins, and those of the next 64 when it ends, so that the tensor cores stay
    busy. A fence right after a store takes long: one fence serves both stores of this function, long after that of dQ.
    """
    key_tiles, value_tiles, query_ring, gradient_ring, statistics_ring, ds_tiles, dq_tiles = tiles
    _keys_full, full, empty, ds_full, _dq_empty = barriers
    layout: gl.constexpr = wgmma_layout(64)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(DIM), k_width=2)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    # zeros that the compiler does not know: it would keep all addresses of shared memory in registers
    zero = (2 * iteration + HALF) >> 30
    zero_too = (2 * iteration + HALF + 4) >> 30
    q = query_ring.index(HALF + zero).reshape([ROWS, DIM])
    d_out = gradient_ring.index(HALF + zero).reshape([ROWS, DIM])

    # S^T is there, and dP^T in flight
    if DIM == 64:
        if HALF == 0:
            scores, d_weights = warpgroup_mma_wait(num_outstanding=0, deps=next_products)
        else:
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(next_products[0],))
            d_weights = next_products[1]
    elif HALF == 0:
        scores = warpgroup_mma_wait(num_outstanding=0, deps=next_products)
        d_weights = _start_products(_left_operand(value_tiles, CONSUMER + zero, DIM), gradient_ring, HALF + zero, DIM)
    else:
        d_weights = _start_products(_left_operand(value_tiles, CONSUMER + zero, DIM), gradient_ring, HALF + zero, DIM)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=next_products)

    # P^T = exp2(S^T - lse), (keys, queries)
    weights = gl.exp2(scores * factor - statistics_ring.index(2 * HALF + zero).load(by_column)[None, :])
    if masked:
        key_index = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        if CAUSAL:
            last = gl.arange(0, ROWS, layout=by_column) + (row + HALF * ROWS + diagonal - first)
            if window is not None:
                weights = gl.where(key_index[:, None] >= (last - window)[None, :], weights, 0.0)
            last = gl.minimum(last, keys - first - 1)
            weights = gl.where(key_index[:, None] <= last[None, :], weights, 0.0)
        else:
            weights = gl.where((key_index < keys - first)[:, None], weights, 0.0)

    # dV += P^T dO
    d_v = warpgroup_mma(gl.convert_layout(weights.to(dtype), left), d_out, d_v, is_async=True)

    # dS^T = P^T * (dP^T - delta), in shared memory for both consumers
    if HALF == 1 or DIM > 64:
        d_weights = warpgroup_mma_wait(num_outstanding=1, deps=(d_weights,))
    delta = statistics_ring.index(2 * HALF + 1 + zero).load(by_column)
    d_scores = (weights * (d_weights - delta[None, :])).to(dtype)
    # until both consumers have multiplied the previous dS: then they were also done with the half before this one
    if HALF == 0:
        mbarrier.wait(empty.index(1), (iteration & 1) ^ 1)
    else:
        mbarrier.wait(empty.index(0), iteration & 1)
    ds_tiles.index(2 * HALF + CONSUMER).store(d_scores)
    fence_async_shared()
    # this also announces dQ of this half of the previous iteration to the adding warp
    mbarrier.arrive(ds_full.index(HALF), count=1)

    # dK += dS^T Q
    d_k = warpgroup_mma(gl.convert_layout(d_scores, left), q, d_k, is_async=True)
    if DIM > 64:
        d_v = warpgroup_mma_wait(num_outstanding=1, deps=(d_v,))

    # dQ of the previous half, and the next scores
    if HALF == 1:
        d_q = _start_query_gradient(0, CONSUMER, ds_tiles, key_tiles, barriers, iteration, zero, DIM)
        mbarrier.wait(full.index(0), (iteration + 1) & 1, pred=more)
    else:
        d_q = _start_query_gradient(1, CONSUMER, ds_tiles, key_tiles, barriers, iteration - 1, zero, DIM)
        mbarrier.wait(full.index(1), iteration & 1)
    next_products = _start_next_products(tiles, operands, CONSUMER + zero_too, 1 - HALF + zero_too, DIM)
    in_flight: gl.constexpr = 1 if DIM > 64 else 2
    d_v, d_k, d_q = warpgroup_mma_wait(num_outstanding=in_flight, deps=(d_v, d_k, d_q))
    mbarrier.arrive(empty.index(HALF), count=1)
    if HALF == 1:
        _store_query_gradient(0, CONSUMER, d_q, dq_tiles, barriers, iteration)
    elif iteration > 0:
        _store_query_gradient(1, CONSUMER, d_q, dq_tiles, barriers, iteration - 1)
    return next_products, d_k, d_v


@gluon.jit
def _consume_backward(
    CONSUMER: gl.constexpr, key_gradient, value_gradient, tiles, barriers, scale, sizes,
    dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """A consumer: dK and dV of 64 keys, and parts of dQ in half of the dimensions."""
    key_tiles, value_tiles, _query_ring, _gradient_ring, _statistics_ring, ds_tiles, dq_tiles = tiles
    _queries, keys, heads, group, pairs, blocks, diagonal, _rows, _processors, window = sizes
    keys_full, full, _empty, ds_full, _dq_empty = barriers
    block, head_index = keys_of_program(gl.program_id(0), blocks, TOGETHER)
    first, count, down = query_pairs(head_index, block, sizes, CAUSAL, ROTATED)
    factor = scale * LOG2_E
    d_k = gl.zeros([ROWS, DIM], gl.float32, layout=wgmma_layout(DIM))
    d_v = gl.zeros([ROWS, DIM], gl.float32, layout=wgmma_layout(DIM))
    # the pairs at the diagonal need a mask; all pairs if the block is the last one of the keys, and not full
    masked = 0
    if CAUSAL:
        beyond = gl.cdiv(gl.maximum(block * PAIR + PAIR - 1 - diagonal, 0), PAIR)
        masked = gl.minimum(gl.maximum(beyond - first, 0), count)
    if (block + 1) * PAIR > keys:
        masked = count
    first_masked = gl.where(down != 0, count - masked, 0)

    # the first scores
    mbarrier.wait(keys_full, 0)
    iterations = group * count
    mbarrier.wait(full.index(0), 0, pred=iterations > 0)
    operands = (_left_operand(key_tiles, CONSUMER, DIM), _left_operand(value_tiles, CONSUMER, DIM))
    next_products = _start_next_products(tiles, operands, CONSUMER, 0, DIM)
    first_key = block * PAIR + CONSUMER * ROWS
    step = 0
    for iteration in range(iterations):
        pair = pair_of_step(step, first, count, down, pairs)
        is_masked = (step >= first_masked) & (step < first_masked + masked)
        if window is not None:  # the last queries do not see the first keys
            is_masked = is_masked | ((pair - block + 1) * PAIR - 1 + diagonal > window)
        for half in gl.static_range(2):
            next_products, d_k, d_v = _backward_half(
                half, CONSUMER, next_products, operands, d_k, d_v, tiles, barriers, pair * PAIR, iteration,
                iteration + 1 < iterations, is_masked, factor, first_key, keys, diagonal, window, dtype, DIM, CAUSAL,
            )  # fmt: skip
        step += 1
        if step == count:  # the next head of queries of the group
            step = 0

    # dQ of the last half
    warpgroup_mma_wait(num_outstanding=0, deps=next_products)
    if iterations > 0:
        fence_async_shared()
        mbarrier.arrive(ds_full.index(0), count=1)
        d_q = _start_query_gradient(1, CONSUMER, ds_tiles, key_tiles, barriers, iterations - 1, 0, DIM)
        d_q = warpgroup_mma_wait(num_outstanding=0, deps=(d_q,))
        _store_query_gradient(1, CONSUMER, d_q, dq_tiles, barriers, iterations - 1)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(1), count=1)

    # dV and dK, through the tile of values, which no other warp reads
    key_heads = heads // group
    place = [head_index // key_heads, head_index % key_heads, first_key, 0]
    tile = value_tiles.index(CONSUMER)
    tile.reshape([ROWS, DIM]).store(d_v.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(value_gradient, place, tile)
    tma.store_wait(0)
    gl.thread_barrier()  # one thread waits, and all write
    tile.reshape([ROWS, DIM]).store((d_k * scale).to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(key_gradient, place, tile)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "pairs", "blocks", "diagonal", "rows", "processors", "left"]
)
def attention_sm90_backward_kernel(
    lse2, delta, counters, key_gradient, value_gradient, query, key, value, gradient, sums, scale,
    queries, keys, heads, group, pairs, blocks, diagonal, rows, processors, left,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The backward pass. Tensors are descriptors, except lse2 and delta, padded to whole pairs, and the counters."""
    dtype: gl.constexpr = query.dtype
    STAGES: gl.constexpr = 2  # a slot for each half of a pair
    # tiles in shared memory
    key_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DIM], key.layout)
    value_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DIM], value.layout)
    query_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, DIM], query.layout)
    gradient_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, DIM], gradient.layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS, DIM // 2], sums.layout)
    statistics_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # full, empty: slots of the rings; ds_full: both consumers have stored dS; dq_empty: the adding warp has read dQ
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=2)
        mbarrier.init(dq_empty.index(slot), count=1)
        mbarrier.init(ds_full.index(slot), count=2)
    fence_async_shared()
    barriers = (keys_full, full, empty, ds_full, dq_empty)
    tiles = (key_tiles, value_tiles, query_ring, gradient_ring, statistics_ring, ds_tiles, dq_tiles)
    sizes = (queries, keys, heads, group, pairs, blocks, diagonal, rows, processors, left)
    gl.warp_specialize(
        [
            (
                _consume_backward,
                (
                    0, key_gradient, value_gradient, tiles, barriers, scale, sizes, dtype, DIM, CAUSAL, ROTATED,
                    TOGETHER,
                ),
            ),
            (
                _consume_backward,
                (
                    1, key_gradient, value_gradient, tiles, barriers, scale, sizes, dtype, DIM, CAUSAL, ROTATED,
                    TOGETHER,
                ),
            ),
            (
                _load_backward,
                (query, key, value, gradient, lse2, delta, tiles, barriers, sizes, STAGES, CAUSAL, ROTATED, TOGETHER),
            ),
            (add_query_gradients, (sums, counters, dq_tiles, barriers, sizes, DIM, CAUSAL, ROTATED, SUMS, TOGETHER)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def _start_chain(left_tiles, consumer, right_rings, slot, DIM: gl.constexpr):
    """Starts the product of 64 keys (or values) with 64 queries (or dO), over all parts of their columns."""
    product = gl.zeros([ROWS, ROWS], gl.float32, layout=wgmma_layout(64))
    for part in gl.static_range(part_count(DIM)):
        left = left_tiles[part].index(consumer).reshape([ROWS, part_dim(DIM, part)])
        right = right_rings[part].index(slot).reshape([ROWS, part_dim(DIM, part)]).permute((1, 0))
        product = warpgroup_mma(left, right, product, use_acc=part > 0, is_async=True)
    return product


@gluon.jit
def _wide(packed, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, dtype: gl.constexpr):
    """Packed numbers (ROWS, COLUMNS) in float32. Unpacked as for a product they would stay in twice the registers."""
    bf16: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    fp16: gl.constexpr = "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
    asm: gl.constexpr = bf16 if dtype == gl.bfloat16 else fp16
    types: gl.constexpr = (gl.float32, gl.float32)
    even, odd = gl.inline_asm_elementwise(asm, "=f,=f,r", [packed], types, is_pure=True, pack=1)
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, COLUMNS]), LAYOUT)


@gluon.jit
def _start_sums(left, right_rings, slot, sums, DIM: gl.constexpr):
    """Starts to add the product of (keys, queries) and (queries, DIM) to sums in one or two parts."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(part_dim(DIM, 0)), k_width=2)
    right = right_rings[0].index(slot).reshape([ROWS, part_dim(DIM, 0)])
    products = (warpgroup_mma(gl.convert_layout(left, operand), right, sums[0], is_async=True),)
    if part_count(DIM) == 2:
        rest: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(part_dim(DIM, 1)), k_width=2)
        right = right_rings[1].index(slot).reshape([ROWS, part_dim(DIM, 1)])
        products = (products[0], warpgroup_mma(gl.convert_layout(left, rest), right, sums[1], is_async=True))  # type: ignore[assignment]
    return products


@gluon.jit
def _start_query_part(PART: gl.constexpr, CONSUMER: gl.constexpr, ds_tiles, key_tiles, zero, DIM: gl.constexpr):
    """Starts dQ = dS K of 64 queries, in this consumer's half of the columns of a part."""
    width: gl.constexpr = part_dim(DIM, PART) // 2
    d_q = gl.zeros([ROWS, width], gl.float32, layout=wgmma_layout(width))
    for block in gl.static_range(2):
        d_scores = ds_tiles.index(block + zero).permute((1, 0))
        k = key_tiles[PART].index(block + zero).reshape([ROWS, 2 * width]).slice(CONSUMER * width, width, dim=1)
        d_q = warpgroup_mma(d_scores, k, d_q, use_acc=block == 1, is_async=True)
    return d_q


@gluon.jit
def _add_wide(
    sums, counters, tiles, barriers, sizes, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
    SUMS: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The adding warp: as `add_query_gradients`, with one tile for both halves of a pair."""
    dq_tiles = tiles[6]
    _queries, _keys, _heads, group, pairs, blocks, _diagonal, rows, _processors, _left = sizes
    dq_full, dq_empty = barriers[5], barriers[6]
    block, head = keys_of_program(gl.program_id(0), blocks, TOGETHER)
    first, count, down = query_pairs(head, block, sizes, CAUSAL, ROTATED)
    done = 0
    for member in range(group):
        for step in range(count):
            pair = pair_of_step(step, first, count, down, pairs)
            place = (head * group + member) * pairs + pair
            number, before = turn_of_pair(block, pair, down, sizes, CAUSAL, ROTATED, SUMS)
            counter = counters + place * SUMS + number
            for half in gl.static_range(2):
                row = number * rows + place * PAIR + half * ROWS
                mbarrier.wait(dq_full, done & 1)
                if half == 0:  # until it is this program's turn
                    added = gl.atomic_add(counter, 0, sem="relaxed")
                    while added < before:
                        added = gl.atomic_add(counter, 0, sem="relaxed")
                for part in gl.static_range(part_count(DIM)):
                    for consumer in gl.static_range(2):
                        column = part * part_dim(DIM, 0) + consumer * (part_dim(DIM, part) // 2)
                        if before == 0:
                            tma.async_copy_shared_to_global(sums[part], [row, column], dq_tiles[part].index(consumer))
                        else:
                            async_add_shared_to_global(sums[part], [row, column], dq_tiles[part].index(consumer))
                tma.store_wait(0)
                mbarrier.arrive(dq_empty, count=1)
                done += 1
            _wait_until_written()
            gl.atomic_add(counter, 1, sem="release")


@gluon.jit
def _load_wide(
    query, key, value, gradient, lse2, delta, tiles, barriers, sizes, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, ROTATED: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The producer: copies the keys and values of this program, and then queries, dO, lse and delta, block by block."""
    key_tiles, value_tiles, query_rings, gradient_rings, statistics_ring, _ds_tiles, _dq_tiles = tiles
    _queries, _keys, heads, group, pairs, blocks, _diagonal, _rows, _processors, _left = sizes
    keys_full, full, empty = barriers[0], barriers[1], barriers[2]
    key_heads = heads // group
    block, head_index = keys_of_program(gl.program_id(0), blocks, TOGETHER)
    batch = head_index // key_heads
    head = head_index % key_heads
    mbarrier.expect(keys_full, PAIR * (DIM + VALUE_DIM) * BYTES)
    for half in gl.static_range(2):
        row = block * PAIR + half * ROWS
        _copy_parts(key, batch, head, row, keys_full, key_tiles, half, DIM)
        _copy_parts(value, batch, head, row, keys_full, value_tiles, half, VALUE_DIM)
    first, count, down = query_pairs(head_index, block, sizes, CAUSAL, ROTATED)
    lanes = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    done = 0
    for member in range(group):
        for step in range(2 * count):
            pair = pair_of_step(step // 2, first, count, down, pairs)
            slot = done & 1
            row = pair * PAIR + (step & 1) * ROWS
            mbarrier.wait(empty.index(slot), ((done >> 1) & 1) ^ 1)
            mbarrier.expect(full.index(slot), ROWS * (DIM + VALUE_DIM) * BYTES)
            _copy_parts(query, batch, head * group + member, row, full.index(slot), query_rings, slot, DIM)
            _copy_parts(gradient, batch, head * group + member, row, full.index(slot), gradient_rings, slot, VALUE_DIM)
            start = (head_index * group + member).to(gl.int64) * (pairs * PAIR) + row
            lse2_rows = gl.load(lse2 + start + lanes)
            delta_rows = gl.load(delta + start + lanes)
            statistics_ring.index(2 * slot).store(lse2_rows)
            statistics_ring.index(2 * slot + 1).store(delta_rows)
            mbarrier.arrive(full.index(slot), count=1)
            done += 1


@gluon.jit
def _consume_wide(
    CONSUMER: gl.constexpr, key_gradient, value_gradient, tiles, barriers, scale, sizes,
    dtype: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """A consumer: dK and dV of 64 keys, and parts of dQ in half of the columns.

    With more than 256 columns of dK and dV, registers for dQ are free after the products before it.
    """
    key_tiles, value_tiles, query_rings, gradient_rings, statistics_ring, ds_tiles, dq_tiles = tiles
    _queries, keys, heads, group, pairs, blocks, diagonal, _rows, _processors, window = sizes
    keys_full, full, empty, ds_full, ds_empty, dq_full, dq_empty = barriers
    layout: gl.constexpr = wgmma_layout(64)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    CROWDED: gl.constexpr = DIM + VALUE_DIM > 256
    block, head_index = keys_of_program(gl.program_id(0), blocks, TOGETHER)
    first, count, down = query_pairs(head_index, block, sizes, CAUSAL, ROTATED)
    factor = scale * LOG2_E
    d_k = _zero_sums(DIM)
    d_v = _zero_sums(VALUE_DIM)
    # the pairs at the diagonal need a mask; all pairs if the block is the last one of the keys, and not full
    masked = 0
    if CAUSAL:
        beyond = gl.cdiv(gl.maximum(block * PAIR + PAIR - 1 - diagonal, 0), PAIR)
        masked = gl.minimum(gl.maximum(beyond - first, 0), count)
    if (block + 1) * PAIR > keys:
        masked = count
    first_masked = gl.where(down != 0, count - masked, 0)
    first_key = block * PAIR + CONSUMER * ROWS

    mbarrier.wait(keys_full, 0)
    steps = 2 * group * count
    step = 0  # of one head of queries
    for done in range(steps):
        slot = done & 1
        # zeros that the compiler does not know: it would keep all addresses of shared memory in registers
        zero = done >> 30
        zero_too = (done + 4) >> 30
        # S^T = K Q^T and dP^T = V dO^T, (keys, queries)
        mbarrier.wait(full.index(slot), (done >> 1) & 1)
        scores = _start_chain(key_tiles, CONSUMER + zero, query_rings, slot, DIM)
        if CROWDED:
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        else:
            d_weights = _start_chain(value_tiles, CONSUMER + zero, gradient_rings, slot, VALUE_DIM)
            scores = warpgroup_mma_wait(num_outstanding=part_count(VALUE_DIM), deps=(scores,))

        # P^T = exp2(S^T - lse)
        weights = gl.exp2(scores * factor - statistics_ring.index(2 * slot).load(by_column)[None, :])
        pair_step = step // 2
        pair = pair_of_step(pair_step, first, count, down, pairs)
        is_masked = (pair_step >= first_masked) & (pair_step < first_masked + masked)
        if window is not None:  # the last queries do not see the first keys
            is_masked = is_masked | ((pair - block + 1) * PAIR - 1 + diagonal > window)
        if is_masked:
            key_index = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            if CAUSAL:
                row = pair * PAIR + (step & 1) * ROWS
                last = gl.arange(0, ROWS, layout=by_column) + (row + diagonal - first_key)
                if window is not None:
                    weights = gl.where(key_index[:, None] >= (last - window)[None, :], weights, 0.0)
                last = gl.minimum(last, keys - first_key - 1)
                weights = gl.where(key_index[:, None] <= last[None, :], weights, 0.0)
            else:
                weights = gl.where((key_index < keys - first_key)[:, None], weights, 0.0)
        packed = _packed(weights, ROWS, dtype)  # alone from here on: a quarter of the registers
        if CROWDED:
            d_weights = _start_chain(value_tiles, CONSUMER + zero, gradient_rings, slot, VALUE_DIM)
        left = _unpacked(packed, ROWS, part_dim(VALUE_DIM, 0), dtype)
        d_v = _start_sums(left, gradient_rings, slot + zero_too, d_v, VALUE_DIM)

        # dS^T = P^T * (dP^T - delta), in shared memory for both consumers
        d_weights = warpgroup_mma_wait(num_outstanding=part_count(VALUE_DIM), deps=(d_weights,))
        delta = statistics_ring.index(2 * slot + 1).load(by_column)
        d_scores = (_wide(packed, ROWS, layout, dtype) * (d_weights - delta[None, :])).to(dtype)
        mbarrier.wait(ds_empty, (done & 1) ^ 1)
        ds_tiles.index(CONSUMER).store(d_scores)
        fence_async_shared()
        mbarrier.arrive(ds_full, count=1)
        d_k = _start_sums(d_scores, query_rings, slot + zero_too, d_k, DIM)
        if CROWDED:
            d_k = _wait_for_results(d_k, 0, DIM)
            d_v = _wait_for_results(d_v, 0, VALUE_DIM)
            mbarrier.arrive(empty.index(slot), count=1)

        # dQ = dS K
        mbarrier.wait(ds_full, done & 1)
        d_q = (_start_query_part(0, CONSUMER, ds_tiles, key_tiles, zero_too, DIM),)
        if part_count(DIM) == 2:
            d_q = (d_q[0], _start_query_part(1, CONSUMER, ds_tiles, key_tiles, zero_too, DIM))  # type: ignore[assignment]
        if not CROWDED:
            d_v = _wait_for_results(d_v, 2 * part_count(DIM), VALUE_DIM)
            d_k = _wait_for_results(d_k, 2 * part_count(DIM), DIM)
            mbarrier.arrive(empty.index(slot), count=1)
        d_q = _wait_for_results(d_q, 0, DIM)
        mbarrier.arrive(ds_empty, count=1)
        mbarrier.wait(dq_empty, (done & 1) ^ 1)
        for part in gl.static_range(part_count(DIM)):
            dq_tiles[part].index(CONSUMER).store(d_q[part])
        fence_async_shared()
        mbarrier.arrive(dq_full, count=1)
        step += 1
        if step == 2 * count:  # the next head of queries of the group
            step = 0

    # dV and dK, through the tiles of values and keys when nobody reads them any more
    mbarrier.wait(ds_empty, (steps - 1) & 1, pred=steps > 0)
    key_heads = heads // group
    for part in gl.static_range(part_count(VALUE_DIM)):
        value_tiles[part].index(CONSUMER).reshape([ROWS, part_dim(VALUE_DIM, part)]).store(d_v[part].to(dtype))
    for part in gl.static_range(part_count(DIM)):
        key_tiles[part].index(CONSUMER).reshape([ROWS, part_dim(DIM, part)]).store((d_k[part] * scale).to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    for part in gl.static_range(part_count(VALUE_DIM)):
        place = [head_index // key_heads, head_index % key_heads, first_key, part * part_dim(VALUE_DIM, 0)]
        tma.async_copy_shared_to_global(value_gradient[part], place, value_tiles[part].index(CONSUMER))
    for part in gl.static_range(part_count(DIM)):
        place = [head_index // key_heads, head_index % key_heads, first_key, part * part_dim(DIM, 0)]
        tma.async_copy_shared_to_global(key_gradient[part], place, key_tiles[part].index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "pairs", "blocks", "diagonal", "rows", "processors", "left"]
)
def attention_sm90_wide_backward_kernel(
    lse2, delta, counters, key_gradient, value_gradient, query, key, value, gradient, sums,
    key_gradient_rest, value_gradient_rest, query_rest, key_rest, value_rest, gradient_rest, sums_rest, scale,
    queries, keys, heads, group, pairs, blocks, diagonal, rows, processors, left,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """The backward pass of heads whose columns are in parts, or of another number for values.

    It has one tile of dS and one of dQ: tiles of keys, values, queries and dO leave no more shared memory. The
    descriptors `rest` are for second parts, or None.
    """
    dtype: gl.constexpr = query.dtype
    # tiles in shared memory
    query_parts = in_parts(query, query_rest, DIM)
    key_parts = in_parts(key, key_rest, DIM)
    value_parts = in_parts(value, value_rest, VALUE_DIM)
    gradient_parts = in_parts(gradient, gradient_rest, VALUE_DIM)
    key_gradients = in_parts(key_gradient, key_gradient_rest, DIM)
    value_gradients = in_parts(value_gradient, value_gradient_rest, VALUE_DIM)
    sums_parts = in_parts(sums, sums_rest, DIM)
    key_tiles = _tiles(2, ROWS, key_parts, dtype, DIM)
    value_tiles = _tiles(2, ROWS, value_parts, dtype, VALUE_DIM)
    query_rings = _tiles(2, ROWS, query_parts, dtype, DIM)
    gradient_rings = _tiles(2, ROWS, gradient_parts, dtype, VALUE_DIM)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_tiles = (gl.allocate_shared_memory(gl.float32, [2, ROWS, part_dim(DIM, 0) // 2], sums.layout),)
    if part_count(DIM) == 2:
        rest = gl.allocate_shared_memory(gl.float32, [2, ROWS, part_dim(DIM, 1) // 2], sums_rest.layout)
        dq_tiles = (dq_tiles[0], rest)  # type: ignore[assignment]
    statistics_ring = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # full, empty: slots of queries and dO; ds: both consumers have stored dS, or read it; dq: the same of dQ
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=2)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(ds_empty, count=2)
    mbarrier.init(dq_full, count=2)
    mbarrier.init(dq_empty, count=1)
    fence_async_shared()
    barriers = (keys_full, full, empty, ds_full, ds_empty, dq_full, dq_empty)
    tiles = (key_tiles, value_tiles, query_rings, gradient_rings, statistics_ring, ds_tiles, dq_tiles)
    sizes = (queries, keys, heads, group, pairs, blocks, diagonal, rows, processors, left)
    gl.warp_specialize(
        [
            (
                _consume_wide,
                (
                    0, key_gradients, value_gradients, tiles, barriers, scale, sizes, dtype, DIM, VALUE_DIM, CAUSAL,
                    ROTATED, TOGETHER,
                ),
            ),
            (
                _consume_wide,
                (
                    1, key_gradients, value_gradients, tiles, barriers, scale, sizes, dtype, DIM, VALUE_DIM, CAUSAL,
                    ROTATED, TOGETHER,
                ),
            ),
            (
                _load_wide,
                (
                    query_parts, key_parts, value_parts, gradient_parts, lse2, delta, tiles, barriers, sizes, DIM,
                    VALUE_DIM, CAUSAL, ROTATED, TOGETHER,
                ),
            ),
            (_add_wide, (sums_parts, counters, tiles, barriers, sizes, DIM, CAUSAL, ROTATED, SUMS, TOGETHER)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "queries", "padded", "blocks", "diagonal", "left"])
def attention_sums_kernel(
    sums, query_gradient, batch_stride, head_stride, stride, scale, heads, queries, padded, blocks, diagonal, left,
    size, DIM: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CAUSAL: tl.constexpr, SUMS: tl.constexpr,
    PAIR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dQ from its partial sums, of those to which a part was added. Sums have DIM columns, and a head HEAD_DIM."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows were written last, and are in the L2 cache
    first = program % (padded // ROWS) * ROWS
    head_index = (program // (padded // ROWS)).to(tl.int64)
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    exists = row < queries
    if HEAD_DIM < BLOCK_DIM:
        exists &= column < HEAD_DIM
    parts = blocks
    if CAUSAL:
        parts = tl.minimum(tl.cdiv(tl.maximum(first // PAIR * PAIR + PAIR + diagonal, 0), PAIR), blocks)
        if left is not None:
            parts -= tl.maximum(first // PAIR * PAIR + diagonal - left, 0) // PAIR
    total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    offsets = (head_index * padded + row) * DIM + column
    for part in tl.static_range(SUMS):
        total += tl.load(sums + part * size + offsets, mask=exists & (part < parts), other=0.0)
    batch, head = head_index // heads, head_index % heads
    target = batch * batch_stride + head * head_stride + row.to(tl.int64) * stride + column
    d_q = total * tl.cast(scale, tl.float32)
    tl.store(query_gradient + target, d_q.to(query_gradient.dtype.element_ty), mask=exists)


def backward(
    problem: AttentionProblem, gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor,
    for_query: bool, for_keys: bool, for_bias: bool = False, for_sinks: bool = False,
) -> Gradients:  # fmt: skip
    """The gradients of query, key and value, which are computed together, and of sinks. No problem has a bias."""
    if not _is_tma_copyable(gradient):
        gradient = gradient.contiguous()
    heads = problem.batches * problem.heads
    pairs, blocks = triton.cdiv(problem.queries, _PAIR), triton.cdiv(problem.keys, _PAIR)
    padded = pairs * _PAIR
    lse2, delta = statistics(problem, gradient, lse.contiguous(), lse_gradient, addressable(result), padded)
    by_key, by_value = (
        problem.new_token_major(problem.batches, problem.keys, problem.key_heads, columns)
        for columns in (problem.dim, problem.value_dim)
    )
    device = gradient.device
    dim, value_dim = sm90_backward_dims(problem.dim, problem.value_dim)
    number = query_gradient_sums(dim, problem.queries)
    sums = torch.empty((number * heads * padded, dim), dtype=torch.float32, device=device)
    counters = torch.zeros(heads * pairs * number, dtype=torch.int32, device=device)
    causal = problem.right == 0
    diagonal = _diagonal_offset(problem)
    key_heads = problem.batches * problem.key_heads
    left = problem.left if problem.left >= 0 else None
    # Programs may wait for later ones if these surely run at the same time. In a window each program comes to a pair of
    # blocks one step after the program before it, in the order of their numbers, and none has to wait
    together = (
        1 if left is not None else heads_together(dim, causal, problem.group, key_heads, blocks, processors(device))
    )
    rotated = blocks <= processors(device) and together == 1 and left is None
    tensors = (
        (by_key, dim), (by_value, value_dim), (problem.query, dim), (problem.key, dim), (problem.value, value_dim),
        (gradient, value_dim),
    )  # fmt: skip
    grid = (blocks * key_heads, 1, 1)
    numbers = (
        problem.scale, problem.queries, problem.keys, problem.heads, problem.group, pairs, blocks, diagonal,
        heads * padded, processors(device), left,
    )  # fmt: skip
    if dim == value_dim and dim in _OVERLAPPED_DIMS:
        tiles = (_tile_descriptor(x, _WARPGROUP_ROWS, columns) for x, columns in tensors)
        launch(
            attention_sm90_backward_kernel, grid, lse2, delta, counters, *tiles,
            descriptor(sums, [_WARPGROUP_ROWS, dim // 2]), *numbers, dim, causal, rotated, number, together,
            warps=4, registers=168,
        )  # fmt: skip
    else:
        firsts, rests = zip(*(_part_descriptors(x, _WARPGROUP_ROWS, columns) for x, columns in tensors), strict=True)
        sums_parts = [descriptor(sums, [_WARPGROUP_ROWS, part_dim(dim, part) // 2]) for part in range(part_count(dim))]
        launch(
            attention_sm90_wide_backward_kernel, grid, lse2, delta, counters, *firsts, sums_parts[0],
            *rests, sums_parts[1] if len(sums_parts) == 2 else None, *numbers, dim, value_dim, causal, rotated, number,
            together, warps=4, registers=168,
        )  # fmt: skip
    empty = gradient.new_empty(0)
    by_sinks = empty
    if for_sinks and problem.sinks is not None:
        by_sinks = sinks_backward(problem.sinks, lse, delta[..., : problem.queries])
    if not for_keys:
        by_key = by_value = empty
    if not for_query:
        return empty, by_key, by_value, empty, by_sinks
    by_query = problem.new_token_major(problem.batches, problem.queries, problem.heads, problem.dim)
    launch(
        attention_sums_kernel, (pairs * (_PAIR // _SUM_ROWS) * heads, 1, 1), sums, by_query, *by_query.stride()[:3],
        problem.scale, problem.heads, problem.queries, padded, blocks, diagonal, left, heads * padded * dim,
        dim, problem.dim, next_power_of_2(dim), causal, number, _PAIR, _SUM_ROWS,
    )  # fmt: skip
    return by_query, by_key, by_value, empty, by_sinks
