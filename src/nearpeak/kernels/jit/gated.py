"""The kernels of `swiglu` and `geglu`, from two tensors or from one that holds both.

The halves of a packed row are two tensors with a common stride. Interleaved ones are loaded together and taken apart
in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.activations import activate, as_tiles, candidates, tile, value_and_derivative
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.rows import as_rows, common_width

__all__ = ["backward", "backward_packed", "candidates", "forward", "forward_packed"]


@triton.jit
def load_pair(
    gate, up, first_row, first_column, rows, columns, gate_stride, up_stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of the gate and one of the other factor, in float32."""
    row = tl.arange(0, ROWS)[:, None]
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        inside = (row < rows - first_row) & (column < 2 * (columns - first_column))
        gate += first_row * gate_stride + 2 * first_column + row.to(tl.int64) * gate_stride
        both = tl.load(gate + column, mask=inside, other=0.0)
        one, other = tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < rows - first_row) & (column < columns - first_column)
        gate += first_row * gate_stride + first_column + row.to(tl.int64) * gate_stride
        up += first_row * up_stride + first_column + row.to(tl.int64) * up_stride
        one = tl.load(gate + column, mask=inside, other=0.0)
        other = tl.load(up + column, mask=inside, other=0.0)
    return one.to(tl.float32), other.to(tl.float32)


@triton.jit
def forward_kernel(
    gate, up, result, rows, columns, column_blocks, gate_stride, up_stride,
    NAME: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, gate_stride, up_stride = columns // WIDTH * WIDTH, gate_stride // WIDTH * WIDTH, up_stride // WIDTH * WIDTH
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * ROWS
    first_column = (program % column_blocks).to(tl.int64) * BLOCK
    one, other = load_pair(
        gate, up, first_row, first_column, rows, columns, gate_stride, up_stride, INTERLEAVED, ROWS, BLOCK
    )
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < rows - first_row) & (column < columns - first_column)
    result += first_row * columns + first_column + row.to(tl.int64) * columns
    tl.store(result + column, (activate(one, NAME) * other).to(result.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    gradient, gate, up, gate_gradient, up_gradient, rows, columns, column_blocks,
    gradient_stride, gate_stride, up_stride, result_stride,
    NAME: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, gate_stride, up_stride = columns // WIDTH * WIDTH, gate_stride // WIDTH * WIDTH, up_stride // WIDTH * WIDTH
    gradient_stride, result_stride = gradient_stride // WIDTH * WIDTH, result_stride // WIDTH * WIDTH
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * ROWS
    first_column = (program % column_blocks).to(tl.int64) * BLOCK
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < rows - first_row) & (column < columns - first_column)
    gradient += first_row * gradient_stride + first_column + row.to(tl.int64) * gradient_stride
    upstream = tl.load(gradient + column, mask=inside, other=0.0).to(tl.float32)
    one, other = load_pair(
        gate, up, first_row, first_column, rows, columns, gate_stride, up_stride, INTERLEAVED, ROWS, BLOCK
    )
    value, slope = value_and_derivative(one, NAME)
    one = (upstream * other * slope).to(gate_gradient.dtype.element_ty)
    other = (upstream * value).to(gate_gradient.dtype.element_ty)
    line = first_row * result_stride + row.to(tl.int64) * result_stride
    if INTERLEAVED:
        both = tl.reshape(tl.join(one, other), (ROWS, 2 * BLOCK))
        column = tl.arange(0, 2 * BLOCK)[None, :]
        inside = (row < rows - first_row) & (column < 2 * (columns - first_column))
        tl.store(gate_gradient + line + 2 * first_column + column, both, mask=inside)
    else:
        tl.store(gate_gradient + line + first_column + column, one, mask=inside)
        tl.store(up_gradient + line + first_column + column, other, mask=inside)


def forward(gate: Tensor, up: Tensor, activation: str, *, config: dict[str, Any] | None = None) -> Tensor:
    """The activation of `gate` times `up`, contiguous. Copies what has a last stride that is not 1."""
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if result.numel():
        gate, up = as_tiles(gate, up, flat=True)
        _forward(gate, up, result, activation, False, config)
    return result


def forward_packed(x: Tensor, activation: str, interleaved: bool, *, config: dict[str, Any] | None = None) -> Tensor:
    """The same from one tensor that holds both factors. Copies x where its last stride is not 1."""
    result = x.new_empty([*x.shape[:-1], x.shape[-1] // 2])
    if result.numel():
        _forward(*_halves(as_rows(x), interleaved), result, activation, interleaved, config)
    return result


def backward(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: str, *, config: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of both factors, contiguous. Copies what has a last stride that is not 1."""
    gate_gradient = torch.empty_like(gate, memory_format=torch.contiguous_format)
    up_gradient = torch.empty_like(up, memory_format=torch.contiguous_format)
    if gate.numel():
        gradient, gate, up = as_tiles(gradient, gate, up, flat=True)
        gradients = gate_gradient.view(gate.shape), up_gradient.view(gate.shape)
        _backward(gradient, gate, up, *gradients, activation, False, config)
    return gate_gradient, up_gradient


def backward_packed(
    gradient: Tensor, x: Tensor, activation: str, interleaved: bool, *, config: dict[str, Any] | None = None
) -> Tensor:
    """The gradient of the tensor that holds both factors, contiguous. Copies what has a last stride that is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        x = as_rows(x)
        factors, gradients = _halves(x, interleaved), _halves(result.view(x.shape), interleaved)
        _backward(as_rows(gradient), *factors, *gradients, activation, interleaved, config)
    return result


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x, x
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def _forward(
    gate: Tensor, up: Tensor, result: Tensor, activation: str, interleaved: bool, config: dict[str, Any] | None
) -> None:
    rows = gate.shape[0]
    columns = gate.shape[1] // (2 if interleaved else 1)
    config = config or tuned("gated_forward", columns, gate.device) or tile(rows, columns)
    block, height = config["block"], config["rows"]
    column_blocks = triton.cdiv(columns, block)
    launch(
        forward_kernel, (column_blocks * triton.cdiv(rows, height), 1, 1),
        gate, up, result, rows, columns, column_blocks, gate.stride(0), up.stride(0),
        activation, interleaved, common_width(columns, gate.stride(0), up.stride(0)), height, block,
        warps=config["warps"],
    )  # fmt: skip


def _backward(
    gradient: Tensor, gate: Tensor, up: Tensor, gate_gradient: Tensor, up_gradient: Tensor,
    activation: str, interleaved: bool, config: dict[str, Any] | None,
) -> None:  # fmt: skip
    rows, columns = gradient.shape
    strides = gradient.stride(0), gate.stride(0), up.stride(0), gate_gradient.stride(0)
    config = config or tuned("gated_backward", columns, gate.device) or tile(rows, columns)
    block, height = config["block"], config["rows"]
    column_blocks = triton.cdiv(columns, block)
    launch(
        backward_kernel, (column_blocks * triton.cdiv(rows, height), 1, 1),
        gradient, gate, up, gate_gradient, up_gradient, rows, columns, column_blocks, *strides,
        activation, interleaved, common_width(columns, *strides), height, block, warps=config["warps"],
    )  # fmt: skip
