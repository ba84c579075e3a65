"""What the kernel of products for Hopper takes, its tiles, and how it is launched.

It is for factors of 16 and 8 bits whose tiles can be copied by one instruction: one dimension next to each other in
memory, the other one multiples of 16 bytes apart. The rest is for the portable kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels.configs import processors, tuned
from nearpeak.kernels.jit import gluon
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.product_portable import Epilogue, Scales
from nearpeak.kernels.operations.product_arguments import BLOCKS, OUTER

_ALIGNED_BYTES = 16
_SMALLEST = 128
"""Rows and columns of the smallest tile."""
_SHARED_BYTES = 232_448
"""Shared memory of a program, at most."""
_BARRIER_BYTES = 512
_ROW_BYTES = 128
"""A row of a tile of a factor: as wide as what shared memory is swizzled by."""
_LEAST_STAGES, _MOST_STAGES = 3, 6
_CACHED_ROWS = 2048
"""Rows of the result that are worked on at a time: with as many columns, their factors stay in the cache."""


def takes(a: Tensor, b: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> bool:
    """Whether the kernel is for a product, on its device."""
    if not gluon.runs_on(a.device) or a.dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return False
    if a.dtype == torch.float8_e4m3fn and (_is_across(a) or _is_across(b)):
        return False
    if epilogue.gated and _is_across(b):
        return False  # tiles of both halves would not lie next to each other
    if scales is not None and scales.kind == BLOCKS and epilogue.gated and b.shape[0] % 256:
        return False  # a tile of the second factor would have two scales
    written = [result] if epilogue.residual is None else [result, epilogue.residual.reshape(result.shape)]
    return (
        0 not in a.shape
        and max(*a.shape, *b.shape) < 2**30
        and all(map(_is_copyable, (*_halves(a, False), *_halves(b, epilogue.gated))))
        and all(_is_copyable(one) and not _is_across(one) and one.dtype == result.dtype for one in written)
        and result.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (
            not epilogue.keep
            or (result.dtype == a.dtype and result.shape[1] * result.element_size() % _ALIGNED_BYTES == 0)
        )
    )


def fills(result: Tensor) -> bool:
    """Whether a result has tiles for a quarter of the processors, as others have no more than four times as many."""
    rows, columns = result.shape
    tiles: int = triton.cdiv(rows, _SMALLEST) * triton.cdiv(columns, _SMALLEST)
    return 4 * tiles >= processors(result.device)


def _is_across(x: Tensor) -> bool:
    """Whether what is next to each other in memory are rows."""
    return x.stride(1) != 1 and x.shape[1] != 1


def _is_copyable(x: Tensor) -> bool:
    """Whether tiles of a matrix can be copied by one instruction."""
    inner = int(not _is_across(x))
    apart = x.stride(1 - inner) * x.element_size()
    return (
        (x.stride(inner) == 1 or x.shape[inner] == 1)
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and (x.shape[1 - inner] == 1 or (apart > 0 and apart % _ALIGNED_BYTES == 0))
    )


def _halves(b: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The rows of the gate and those of the other factor; twice the same without a gate."""
    half = b.shape[0] // 2
    return (b[:half], b[half:]) if gated else (b, b)


def _described(x: Tensor, lines: int, width: int) -> Any:
    """Tiles of so many rows and columns of a matrix; of its transpose where rows are next to each other in memory."""
    block = [lines, width]
    if _is_across(x):
        x, block = x.t(), [width, lines]
    # the stride of a single row says nothing, and must be a multiple of 16 bytes all the same
    apart = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // _ALIGNED_BYTES) * _ALIGNED_BYTES
    if x.stride() != (apart, 1):
        x = torch.as_strided(x, x.shape, (apart, 1))
    return gluon.descriptor(x, block)


def multiply(
    a: Tensor, b: Tensor, result: Tensor, kept: Tensor | None, epilogue: Epilogue, scales: Scales | None,
    config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes a @ b.T and what follows it into `result`."""
    from nearpeak.kernels.jit.product_hopper import product_hopper_kernel

    rows, columns = result.shape
    promoted = scales is not None and (scales.kind == BLOCKS or not scales.fast)
    name = table_name(result.element_size(), epilogue, scales)
    config = config or (tuned(name, result.numel(), a.device) if name else None) or tile(a, result, epilogue, scales)
    lines, consumers, block_n, pieces = config["rows"], config["consumers"], config["block_n"], config["pieces"]
    depth = _ROW_BYTES // a.element_size()
    row_tiles, column_tiles = triton.cdiv(rows, lines * consumers), triton.cdiv(columns, block_n)
    tiles = row_tiles * column_tiles
    piece = block_n // pieces
    gate, up = (_described(one, block_n, depth) for one in _halves(b, epilogue.gated))
    out = _described(result, lines, piece)
    kept_gate, kept_up = (out, out) if kept is None else _kept(kept, lines, piece, epilogue.gated)
    residual = out
    if epilogue.residual is not None:
        residual = _described(epilogue.residual.reshape(rows, columns), lines, piece)
    bias = epilogue.bias
    outer = scales is not None and scales.kind == OUTER
    left, right, strides = _scales(scales, result)
    launch(
        product_hopper_kernel, (min(processors(a.device), tiles), 1, 1),
        result if bias is None else bias.contiguous(), left, right, _described(a, lines, depth), gate, up, out,
        kept_gate, kept_up, residual, rows, columns, triton.cdiv(a.shape[1], depth), row_tiles, column_tiles,
        config.get("group") or max(1, _CACHED_ROWS // (lines * consumers)), tiles, *strides,
        lines, block_n, depth, consumers, config["stages"], pieces, config["buffers"], epilogue.activation,
        epilogue.gated, kept is not None, bias is not None, epilogue.residual is not None, outer,
        scales is not None and scales.kind == BLOCKS, promoted, _is_across(a), _is_across(b),
        warps=4, registers=168 if consumers == 2 else 128,
    )  # fmt: skip


def _kept(kept: Tensor, lines: int, piece: int, gated: bool) -> tuple[Any, Any]:
    half = kept.shape[1] // 2
    both = (kept[:, :half], kept[:, half:]) if gated else (kept, kept)
    return _described(both[0], lines, piece), _described(both[1], lines, piece)


def _scales(scales: Scales | None, none: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    if scales is None:
        return none, none, (0, 0, 0, 0)
    one = torch.ones((), device=none.device) if scales.x is None or scales.weight is None else none
    left, right = one if scales.x is None else scales.x, one if scales.weight is None else scales.weight
    return left, right, (*scales.x_strides, *scales.weight_strides)


def kind_of(epilogue: Epilogue, scales: Scales | None) -> str:
    """The name of products that have configurations in common."""
    bits = "16_bits" if scales is None else "8_bits_fast" if scales.kind != BLOCKS and scales.fast else "8_bits"
    return bits + ("_gated" if epilogue.gated else "")


def table_name(itemsize: int, epilogue: Epilogue, scales: Scales | None) -> str | None:
    """What a product is called in tables, where its size is the number of results; None where nobody measures.

    Those with a residual or results of 32 bits need more shared memory than configurations that were measured leave.
    """
    if epilogue.residual is not None or itemsize != 2:
        return None
    return f"product_hopper_{kind_of(epilogue, scales)}" + ("_kept" if epilogue.keep else "")


def shared_bytes(config: dict[str, Any], gated: bool, itemsize: int) -> int:
    """The shared memory that a configuration takes, for a result whose elements have so many bytes."""
    columns = config["block_n"] * (2 if gated else 1)
    lines = config["rows"] * config["consumers"]
    ring: int = config["stages"] * (lines + columns) * _ROW_BYTES
    buffers: int = config["buffers"] * lines * config["block_n"] // config["pieces"] * itemsize
    return ring + buffers + _BARRIER_BYTES


def tile(a: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> dict[str, Any]:
    """What to launch with where nobody measured: of the tiles of two warpgroups, those that leave least to wait for."""
    found = candidates(
        result.numel(), kind_of(epilogue, scales), result.element_size(), epilogue.residual is not None, epilogue.keep
    )
    busy = processors(a.device)

    def cost(config: dict[str, Any]) -> float:
        tall, wide = config["rows"] * config["consumers"], config["block_n"]
        tiles = triton.cdiv(result.shape[0], tall) * triton.cdiv(result.shape[1], wide)
        # a small tile reads more for each product, and has to be written as well
        found: float = triton.cdiv(tiles, busy) * (tall * wide + 2048.0) * (1.0 + 16.0 / tall + 16.0 / wide)
        return found

    return min((one for one in found if one["consumers"] == 2), key=cost)


def candidates(
    size: int, kind: str = "16_bits", itemsize: int = 2, has_residual: bool = False, keep: bool = False
) -> list[dict[str, Any]]:  # fmt: skip
    """Configurations worth measuring, the likely one first: rows and columns of a tile decide, not the whole `size`.

    A result that is written by pieces leaves room for a longer ring; a residual is there in time if it comes whole.
    What is kept for the backward pass takes registers, so that pieces are smaller.
    """
    gated = kind.endswith("_gated")
    if kind.startswith("8_bits") and "fast" not in kind:  # each sum is there twice: what it was, and what is added
        shapes = [(64, 2, 64), (64, 3, 64)] if gated else [(64, 2, 128), (64, 3, 128)]
    elif gated:
        shapes = [(64, 2, 128), (64, 2, 64)] if keep else [(64, 2, 128), (128, 2, 64), (64, 2, 64)]
    else:
        shapes = [(64, 2, 256), (128, 2, 128), (64, 2, 128)]
    found = []
    for rows, consumers, block_n in shapes:
        for pieces, buffers in _ways_to_write(rows, block_n, has_residual, keep):
            config = {
                "rows": rows, "consumers": consumers, "block_n": block_n, "pieces": pieces, "buffers": buffers,
                "stages": _MOST_STAGES,
            }  # fmt: skip
            while shared_bytes(config, gated, itemsize) > _SHARED_BYTES:
                config["stages"] -= 1
            if config["stages"] >= _LEAST_STAGES:
                found.append(config)
    return found


def _ways_to_write(rows: int, columns: int, has_residual: bool, keep: bool) -> list[tuple[int, int]]:
    """Into how many pieces a warpgroup's part of a tile is cut, and in how many buffers they are."""
    narrow = columns // 64  # of 16 bits, that is what shared memory is swizzled by
    if keep:
        return [(min(narrow, 4), 1 if has_residual else 2)]
    if rows * columns <= 8192:
        return [(1, 1)]
    if has_residual:
        return [(1, 1), (min(narrow, 2), 1)]
    return [(narrow, 2), (2, 1), (1, 1)]
