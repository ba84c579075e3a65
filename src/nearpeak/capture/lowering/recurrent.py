"""LSTM, GRU and plain recurrent layers: one operator of cuDNN, and cells with their pointwise part in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nearpeak.capture.lowering.register import KERNELS, Kernel, Lowering, lowers, natively
from nearpeak.capture.lowering.target import Target

_aten = torch.ops.aten
_RELU, _TANH, _LSTM, _GRU = range(4)
"""cuDNN's numbers of the kinds of cells."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_GRU_WORKSPACE = 5
"""Vectors of the hidden size that the fused GRU cell keeps for its backward pass."""


@lowers("lstm.input")
def lstm(
    target: Target,
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """All layers and steps as one operator."""
    options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    if not _cudnn_takes(target, input):
        return natively("lstm.input", input, hx, params, *options)
    output, hidden, cell = _cudnn(_LSTM, input, hx[0], hx[1], params, *options)
    return output, hidden, cell


def _one_state(name: str, mode: int) -> Lowering:
    @lowers(name)
    def layer(
        target: Target, input: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any
    ) -> Any:
        if not _cudnn_takes(target, input):
            return natively(name, input, hx, params, *options)
        output, hidden, _ = _cudnn(mode, input, hx, None, params, *options)
        return output, hidden

    return layer


gru = _one_state("gru.input", _GRU)
rnn_tanh = _one_state("rnn_tanh.input", _TANH)
rnn_relu = _one_state("rnn_relu.input", _RELU)


def _cudnn_takes(target: Target, input: torch.Tensor) -> bool:
    return target.nvidia and torch.backends.cudnn.enabled and input.dtype in _DTYPES and input.numel() > 0


def _cudnn(
    mode: int,
    input: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights are passed one by one; the buffer that holds all of them on a GPU is left empty here."""
    projected = cell is not None and cell.shape[2] != hidden.shape[2]
    size = cell.shape[2] if projected and cell is not None else hidden.shape[2]
    projection = hidden.shape[2] if projected else 0
    stride = (4 if has_biases else 2) + projected
    shape = (size, projection, num_layers, batch_first, dropout, train, bidirectional)
    results = _aten._cudnn_rnn(input, params, stride, input.new_empty(0), hidden, cell, mode, *shape, [], None)
    return results[0], results[1], results[2]


@lowers("lstm_cell")
def lstm_cell(
    target: Target,
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two products, and all that follows them in one operator."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hidden, cell


@lowers("gru_cell")
def gru_cell(
    target: Target,
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `lstm_cell`."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    hidden: torch.Tensor = _aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]
    return hidden


def _gru_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: Any) -> Any:
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], _GRU_WORKSPACE * hx.shape[1]))


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    gates = 3 * grad_hy.shape[1]
    of_gates = (workspace.new_empty((grad_hy.shape[0], gates)) for _ in range(2))
    of_biases = (workspace.new_empty(gates) if has_bias else None for _ in range(2))
    return (*of_gates, grad_hy.new_empty(grad_hy.shape), *of_biases)


def _rnn_backward(input: torch.Tensor, weight: Sequence[torch.Tensor], *arguments: Any) -> Any:
    hidden, cell, wanted = arguments[2], arguments[3], arguments[-1]
    like = torch.empty_like
    weights = [like(tensor) for tensor in weight] if wanted[3] else [None] * len(weight)
    return like(input), like(hidden), None if cell is None else like(cell), weights


KERNELS.extend(
    [  # torch has no shapes for these
        Kernel("_thnn_fused_gru_cell", "Meta", _gru_cell),
        Kernel("_thnn_fused_gru_cell_backward", "Meta", _gru_cell_backward),
        Kernel("_cudnn_rnn_backward", "Meta", _rnn_backward),
    ]
)
