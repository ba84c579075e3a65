"""Recurrent networks as one operator, and their cells.

A whole network (cuDNN, MIOpen, oneDNN) multiplies every weight matrix with every token: 2 FLOPs for each token and
element of a matrix. Weights are read once, since they can stay on the chip from step to step, as can the activations
between layers; input, first states, output and last states cross the memory. The reserve space for the backward pass is
not charged: it could be recomputed. Gates and activations are epilogues of the products and are not counted.

The backward pass multiplies again for the gradients of the weights, and for those of the data. The gradient of the
first state is not needed unless it is requested, so the first step is left out of the latter.

A cell alone comes after its products and is pointwise.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.matrix import engines
from nearpeak.ops.formulas.pointwise import arithmetic
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def _network(
    op: Op, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], multiply_adds: float, *, tf32: bool
) -> Cost:
    flops, vector = engines(op.tensor("input").dtype, 2.0 * multiply_adds, tf32=tf32)
    return Cost(
        family="recurrent",
        reads=accesses(*reads),
        writes=accesses(*writes),
        flops=flops,
        vector_flops=vector,
    )


def _tokens(data: Tensor) -> int:
    """Steps times batch; packed sequences have them in one dimension."""
    return data.elements // max(1, data.shape[-1])


def _elements(matrices: tuple[Tensor, ...]) -> int:
    return sum(matrix.elements for matrix in matrices if len(matrix.shape) == 2)


@formula("aten._cudnn_rnn", "aten.miopen_rnn")
def _layers(op: Op) -> Cost:
    """Results: output, last state, last cell state; then space for backward and the weights in one piece."""
    weights = op.tensors("weight")
    count = float(_tokens(op.tensor("input")) * _elements(weights))
    reads = (*op.tensors("input", "hx", "cx"), *weights)
    return _network(op, reads, op.outputs[:3], count, tf32=op.tf32_convolutions)


@formula("aten._cudnn_rnn_backward", "aten.miopen_rnn_backward")
def _layers_backward(op: Op) -> Cost:
    """Biases are not needed; the input and the output only for the gradients of the weights."""
    weights, data = op.tensors("weight"), op.tensor("input")
    for_input, _, _, for_weights = op.arguments["output_mask"]
    directions = 2 if op.arguments.get("bidirectional") else 1
    stride = max(1, int(op.arguments["weight_stride0"]))
    first = _elements(tuple(weights[place * stride] for place in range(directions) if place * stride < len(weights)))
    tokens, matrices = _tokens(data), _elements(weights)
    later = max(0, tokens - op.tensor("hx").shape[-2])
    count = float(later * (matrices - first) + for_input * tokens * first + for_weights * tokens * matrices)
    reads = (
        *op.tensors("grad_output", "grad_hy", "grad_cy"),
        *(op.tensors("input", "output") if for_weights else ()),
        *(weight for weight in weights if len(weight.shape) == 2),
    )
    return _network(op, reads, op.outputs, count, tf32=op.tf32_convolutions)


@formula("aten.mkldnn_rnn_layer")
def _layer(op: Op) -> Cost:
    """One layer in one direction."""
    weights = op.tensors(*(f"weight{place}" for place in range(4)))
    count = float(_tokens(op.tensor("input")) * _elements(weights[:2]))
    return _network(op, (*op.tensors("input", "hx_", "cx_"), *weights), op.outputs[:3], count, tf32=False)


@formula("aten.mkldnn_rnn_layer_backward")
def _layer_backward(op: Op) -> Cost:
    """All gradients: those of the data and of the weights are as many products as the forward, each."""
    weights = op.tensors("weight1", "weight2")
    tokens, matrices = _tokens(op.tensor("input")), _elements(weights)
    later = max(0, tokens - op.tensor("hx_").shape[-2])
    count = float(tokens * matrices + later * matrices)
    reads = (*op.tensors("input", "output", "grad_output", "grad_hy", "grad_cy"), *weights)
    return _network(op, reads, op.outputs, count, tf32=False)


@formula("aten._cudnn_rnn_flatten_weight")
def _flatten(op: Op) -> Cost:
    """The weights copied into one piece, whose gaps are not written."""
    weights = op.tensors("weight_arr")
    room = op.outputs[0]
    size = min(room.bytes, sum(weight.elements for weight in weights) * room.item_bytes)
    return Cost(family="movement", reads=accesses(*weights), writes=accesses((room, size)))


_CELLS = {"aten._thnn_fused_lstm_cell": 13, "aten._thnn_fused_gru_cell": 10}
"""Operations for each element of a state. LSTM: four gates, each a sum and an activation, the new cell (3), its tanh,
the new state. GRU: two gates, each a sum and an activation, the candidate (3), the new state (3)."""


@formula(*_CELLS)
def _cell(op: Op) -> Cost:
    state = op.outputs[0]
    return _pointwise(op, op.inputs, _CELLS[op.packet] * state.elements)


@formula("aten._thnn_fused_lstm_cell_backward_impl", "aten._thnn_fused_gru_cell_backward")
def _cell_backward(op: Op) -> Cost:
    """One operation for each gradient of a gate at the least."""
    return _pointwise(op, op.inputs, op.outputs[0].elements if op.outputs else 0)


def _pointwise(op: Op, reads: tuple[Tensor, ...], operations: int) -> Cost:
    vector = arithmetic(reads, (), float(operations))
    return Cost(family="pointwise", reads=accesses(*reads), writes=accesses(*op.written), vector_flops=vector)
