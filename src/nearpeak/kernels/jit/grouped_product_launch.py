"""What the kernels of `grouped_product` for Hopper take, and how they are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nearpeak.kernels.configs import processors, tuned
from nearpeak.kernels.jit import gluon
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.tickets import tickets
from nearpeak.kernels.operations.grouped_product import entries_at
from nearpeak.kernels.operations.grouped_product_operators import number_of

HEIGHT = 128
"""Rows of a tile, of which each of two warpgroups has half."""
_ROWS = 64
_DEPTH = 64
CONFIGS: tuple[dict[str, int], ...] = (
    {"width": 256, "stages": 4, "buffers": 1},
    {"width": 256, "stages": 3, "buffers": 2},
    {"width": 128, "stages": 6, "buffers": 2},
)
"""What is worth measuring: columns of a tile, slots of the ring, and halves of tiles that each warpgroup has on their
way out. The first is for sizes at which nobody measured. In tables the size is how many rows an expert has on average.

By arithmetic, with 128 experts, 32,768 rows and 1,536 columns, tiles that are not full and programs that wait for the
last one leave the first two with 1.16 times the work of the rows, whether experts are drawn evenly or by Beta(1, 5). If
programs took tiles in turns, that were 1.29. Tiles with rows as columns of products, of 256 rows and up to 320 at an
expert's end, were 1.11 and 1.29, and on an H200 no faster in the former case and 13 % slower in the latter."""
GRADIENT_CONFIGS: tuple[dict[str, int], ...] = (
    {"width": 256, "depth": 32, "stages": 6},
    {"width": 256, "depth": 64, "stages": 3},
)
"""The same of the gradient of matrices; a step goes over so many rows. Steps of few rows waste less at an expert's end:
566 TFLOP/s and not 522 with 32,768 rows that 128 experts were drawn for evenly."""
_REGISTERS = 168
"""Of a thread, before warps that multiply take more from the one that loads."""
_EIGHT_WIDTH = 128
_EIGHT_DEPTH = 128
_EIGHT_STAGES = 5
_MOST_ROWS = 2**30
"""What the kernel of the gradient takes for the number of rows."""
_ALIGNED_BYTES = 16


def _is_copyable(x: Tensor) -> bool:
    """Whether tiles of a tensor can be copied by one instruction."""
    return (
        x.stride(-1) == 1
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and 0 < max(x.shape) < 2**31
        and all(stride > 0 and stride * x.element_size() % _ALIGNED_BYTES == 0 for stride in x.stride()[:-1])
    )


def can_gather(tokens: Tensor) -> bool:
    """Whether rows are copied from wherever they are: whole pieces of 16 bytes, and places that are 32 bits long."""
    return tokens.shape[1] * tokens.element_size() % _ALIGNED_BYTES == 0 and tokens.shape[0] * tokens.stride(0) < 2**31


def takes(rows: Tensor, weight: Tensor, height: int, transposed: bool, gated: bool) -> bool:
    """Whether these kernels are for a product, on its device."""
    columns = weight.shape[2 if transposed else 1] // (2 if gated else 1)
    return (
        gluon.runs_on(rows.device)
        and height == HEIGHT
        and rows.dtype in (torch.bfloat16, torch.float16)
        and rows.shape[1] > 0
        and columns * rows.element_size() % _ALIGNED_BYTES == 0
        and _is_copyable(rows)
        and (_is_copyable(weight) or (not gated and _is_copyable(weight.mT)))
    )


def product(
    rows: Tensor, weight: Tensor, groups: Tensor, result: Tensor, kept: Tensor | None, transposed: bool,
    activation: str, config: dict[str, int] | None = None, sources: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the products of rows, and with an activation what it is taken of where that is to be kept.

    With `sources` a product's row is the one that it names, and there are as many products as sources.
    """
    from nearpeak.kernels.jit.grouped_product_hopper import grouped_hopper_kernel

    name = "grouped_product_hopper" + ("_gated" if activation else "")
    number = result.shape[0]
    config = config or tuned(name, number // weight.shape[0], rows.device) or CONFIGS[0]
    width = config["width"]
    experts, columns = weight.shape[0], result.shape[1]
    along = (weight.stride(-1) == 1) != transposed
    matrices = weight if weight.stride(-1) == 1 else weight.mT
    block = [1, width, _DEPTH] if along else [1, _DEPTH, width]
    if activation:  # the same columns of gate and up
        matrices, block = matrices.unflatten(1, (2, columns)), [1, 2, width // 2, _DEPTH]
    column_tiles = triton.cdiv(columns, width // 2 if activation else width)
    tiles = (number // HEIGHT + experts + 1) * column_tiles
    written = _tiles(result, 1, width // 2)
    launch(
        grouped_hopper_kernel, (min(processors(rows.device), tiles), 1, 1), tickets(1, rows.device),
        groups, result, kept, None if sources is None else rows, sources,
        gluon.descriptor(rows, [_ROWS, _DEPTH]), gluon.descriptor(matrices, block), written,
        written if kept is None else _tiles(kept, 2, width // 2),
        experts, columns, rows.shape[1], entries_at(experts), column_tiles, rows.stride(0),
        activation, along, width, _DEPTH, config["stages"], config["buffers"],
        warps=4, registers=_REGISTERS,
    )  # fmt: skip


def _tiles(x: Tensor, parts: int, columns: int) -> object:
    """Tiles of 64 rows and some columns of the parts that rows consist of."""
    return gluon.descriptor(x.view(x.shape[0], parts, -1).transpose(0, 1), [1, _ROWS, columns])


def takes_eight(rows: Tensor, weight: Tensor, height: int, dtype: torch.dtype, activation: str) -> bool:
    """Whether the kernel for numbers of 8 bits is for a product, on its device."""
    columns = weight.shape[1] // (2 if activation else 1)
    return (
        gluon.runs_on(rows.device)
        and height == HEIGHT
        and dtype in (torch.bfloat16, torch.float16)
        and rows.shape[1] > 0
        and columns % (_EIGHT_WIDTH // 2 if activation else 8) == 0  # halves of tiles are within a block
        and _is_copyable(rows)
        and _is_copyable(weight)
    )


def eight(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, result: Tensor,
    activation: str, sources: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the products of rows and matrices of 8 bits; with `sources` of the rows that they name."""
    from nearpeak.kernels.jit.grouped_product_eight import grouped_eight_hopper_kernel

    experts, columns = weight.shape[0], result.shape[1]
    chunk = _EIGHT_WIDTH // 2 if activation else _EIGHT_WIDTH
    block = [1, chunk, _EIGHT_DEPTH]
    if activation:
        weight, block = weight.unflatten(1, (2, columns)), [1, 2, chunk, _EIGHT_DEPTH]
    column_tiles = triton.cdiv(columns, chunk)
    programs = min(processors(rows.device), (result.shape[0] // HEIGHT + experts + 1) * column_tiles)
    blocks = weight_scales.dim() == 3
    launch(
        grouped_eight_hopper_kernel, (programs, 1, 1), tickets(1, rows.device), groups, result, row_scales,
        weight_scales, None if sources is None else rows, sources,
        gluon.descriptor(rows, [_ROWS, _EIGHT_DEPTH]), gluon.descriptor(weight, block),
        gluon.descriptor(result[None], [1, _ROWS, chunk]),
        experts, columns, rows.shape[1], entries_at(experts), column_tiles, weight_scales.shape[1] if blocks else 1,
        rows.stride(0),
        activation, blocks, _EIGHT_WIDTH, _EIGHT_DEPTH, _EIGHT_STAGES,
        warps=4, registers=_REGISTERS,
    )  # fmt: skip


def takes_gradient(gradient: Tensor, rows: Tensor) -> bool:
    """Whether the kernel for the gradient of matrices is for these, on their device."""
    return (
        gluon.runs_on(rows.device)
        and gradient.dtype == rows.dtype
        and rows.dtype in (torch.bfloat16, torch.float16)
        and 0 < rows.shape[0] < _MOST_ROWS
        and rows.shape[1] * rows.element_size() % _ALIGNED_BYTES == 0
        and all(_is_copyable(x) and x.stride(0) < 2**31 for x in (gradient, rows))
    )


def weight_gradient(
    gradient: Tensor, rows: Tensor, groups: Tensor, result: Tensor, config: dict[str, int] | None = None,
    sources: Tensor | None = None, gathered: str = "",
) -> None:  # fmt: skip
    """Writes the gradient of the matrices of all experts.

    What is `gathered`, "gradient" or "rows", has the rows that `sources` name.
    """
    from nearpeak.kernels.jit.grouped_product_gradient import grouped_gradient_hopper_kernel

    experts, columns, depth = result.shape
    config = (
        config
        or tuned("grouped_gradient_hopper", number_of(rows, sources) // experts, rows.device)
        or GRADIENT_CONFIGS[0]
    )
    width, depth_of_step = config["width"], config["depth"]
    down, across = triton.cdiv(columns, HEIGHT), triton.cdiv(depth, width)
    tiles = experts * down * across
    tokens = gradient if gathered == "gradient" else rows
    launch(
        grouped_gradient_hopper_kernel, (min(processors(rows.device), tiles), 1, 1), tickets(1, rows.device), groups,
        tokens if gathered else None, sources,
        _ragged(gradient, depth_of_step, _ROWS), _ragged(rows, depth_of_step, width),
        gluon.descriptor(result, [1, _ROWS, width // 2]),
        tiles, down, across, tokens.stride(0), tokens.shape[1], gathered, width, depth_of_step, config["stages"],
        warps=4, registers=_REGISTERS,
    )  # fmt: skip


def _ragged(x: Tensor, rows: int, columns: int) -> object:
    """Tiles of some rows of which those behind the last of an expert are zeros; see `grouped_product_gradient`."""
    stride = x.stride(0)
    shape = (2**31 - 1, 2**31 - 1, _MOST_ROWS, x.shape[1])
    return gluon.described(x, shape, (2**34 - stride, stride, stride, 1), [1, 1, rows, columns])
