import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

aten = torch.ops.aten


def tensor(storage, *shape, dtype="float16"):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return Tensor(shape=shape, strides=tuple(strides), dtype=dtype, storage=storage)


STEPS, BATCH, WIDTH, HIDDEN = 10, 4, 6, 8
GATES = 4 * HIDDEN


def network(directions=1, bidirectional=False):
    """An LSTM of one layer and its results."""
    matrices = [tensor(10 + 2 * place, GATES, (WIDTH, HIDDEN)[place % 2]) for place in range(2 * directions)]
    biases = [tensor(50 + place, GATES) for place in range(2 * directions)]
    weights = []
    for place in range(directions):
        weights += [*matrices[2 * place : 2 * place + 2], *biases[2 * place : 2 * place + 2]]
    arguments = {
        "input": tensor(0, STEPS, BATCH, WIDTH),
        "weight": tuple(weights),
        "weight_stride0": 4,
        "hx": tensor(1, directions, BATCH, HIDDEN),
        "cx": tensor(2, directions, BATCH, HIDDEN),
        "mode": 2,
        "bidirectional": bidirectional,
    }
    outputs = (
        tensor(3, STEPS, BATCH, directions * HIDDEN),
        tensor(4, directions, BATCH, HIDDEN),
        tensor(5, directions, BATCH, HIDDEN),
        tensor(6, 100000, dtype="uint8"),
        tensor(7, 1000),
    )
    return Op(name="aten._cudnn_rnn.default", arguments=arguments, outputs=outputs)


@pytest.mark.parametrize("directions", [1, 2])
def test_every_matrix_meets_every_token(directions):
    cost = cost_of(network(directions, directions == 2))
    matrices = directions * GATES * (WIDTH + HIDDEN)
    assert cost.family == "recurrent"
    assert cost.flops == {"float16": 2 * STEPS * BATCH * matrices}
    states = 2 * directions * BATCH * HIDDEN
    assert cost.work.bytes_read == 2 * (STEPS * BATCH * WIDTH + states + matrices + 2 * directions * GATES)
    assert cost.work.bytes_written == 2 * (STEPS * BATCH * directions * HIDDEN + states)


def backward(mask):
    forward = network()
    arguments = {
        **forward.arguments,
        "output": forward.outputs[0],
        "grad_output": tensor(20, STEPS, BATCH, HIDDEN),
        "grad_hy": None,
        "grad_cy": None,
        "output_mask": mask,
    }
    return Op(name="aten._cudnn_rnn_backward.default", arguments=arguments, outputs=(tensor(30, STEPS, BATCH, WIDTH),))


def test_backward_multiplies_for_what_is_asked():
    inner, outer = GATES * HIDDEN, GATES * WIDTH
    states = 2 * (STEPS - 1) * BATCH * inner
    assert cost_of(backward((False, False, False, False))).flops == {"float16": states}
    assert cost_of(backward((True, False, False, False))).flops == {"float16": states + 2 * STEPS * BATCH * outer}
    everything = states + 2 * STEPS * BATCH * (2 * outer + inner)
    assert cost_of(backward((True, True, True, True))).flops == {"float16": everything}


def test_backward_needs_no_biases_and_no_input_without_the_gradients_of_weights():
    data, weights = STEPS * BATCH * HIDDEN, GATES * (WIDTH + HIDDEN)
    assert cost_of(backward((True, False, False, False))).work.bytes_read == 2 * (data + weights)
    both = 2 * (2 * data + STEPS * BATCH * WIDTH + weights)
    assert cost_of(backward((True, True, True, True))).work.bytes_read == both


@pytest.mark.filterwarnings("ignore:TF32")
def test_the_layer_of_a_cpu(calls):
    model = torch.nn.LSTM(6, 8)
    data = torch.randn(10, 4, 6, requires_grad=True)
    ops = calls(lambda: model(data)[0].sum().backward())
    found = {op.packet: cost_of(op) for op in ops if "rnn_layer" in op.name}
    if not found:
        pytest.skip("this torch has no oneDNN")
    forward = 2 * STEPS * BATCH * GATES * (WIDTH + HIDDEN)
    assert found["aten.mkldnn_rnn_layer"].vector_flops == {"float32": forward}
    again = 2 * (STEPS - 1) * BATCH * GATES * (WIDTH + HIDDEN)
    assert found["aten.mkldnn_rnn_layer_backward"].vector_flops == {"float32": forward + again}
    assert found["aten.mkldnn_rnn_layer"].work.bytes_written == 4 * (STEPS * BATCH * HIDDEN + 2 * BATCH * HIDDEN)


def test_flattening_copies_the_weights():
    arguments = {"weight_arr": (tensor(0, 8, 8), tensor(1, 8))}
    op = Op(name="aten._cudnn_rnn_flatten_weight.default", arguments=arguments, outputs=(tensor(2, 100),))
    assert (cost_of(op).work.bytes_read, cost_of(op).work.bytes_written) == (144, 144)


@pytest.mark.parametrize(("name", "gates", "operations"), [("lstm", 4, 13), ("gru", 3, 10)])
def test_a_cell_is_pointwise(name, gates, operations):
    states = "cx" if name == "lstm" else "hx"
    arguments = {
        "input_gates": tensor(0, BATCH, gates * HIDDEN),
        "hidden_gates": tensor(1, BATCH, gates * HIDDEN),
        states: tensor(2, BATCH, HIDDEN),
    }
    outputs = (tensor(3, BATCH, HIDDEN), tensor(4, BATCH, 5 * HIDDEN))
    cost = cost_of(Op(name=f"aten._thnn_fused_{name}_cell.default", arguments=arguments, outputs=outputs))
    assert cost.family == "pointwise"
    assert cost.work.bytes_read == 2 * BATCH * HIDDEN * (2 * gates + 1)
    assert cost.work.bytes_written == 2 * BATCH * HIDDEN * 6
    assert cost.vector_flops == {"float32": operations * BATCH * HIDDEN}


def test_the_gradient_of_a_cell_reads_what_is_given():
    arguments = {"grad_hy": None, "grad_cy": tensor(0, 4, 8), "cx": tensor(1, 4, 8), "cy": tensor(2, 4, 8)}
    arguments["workspace"] = tensor(3, 4, 32)
    op = Op(
        name="aten._thnn_fused_lstm_cell_backward_impl.default",
        arguments=arguments,
        outputs=(tensor(4, 4, 32), tensor(5, 4, 8)),
    )
    assert cost_of(op).work.bytes_read == 2 * (3 * 32 + 128)
    assert cost_of(op).vector_flops == {"float32": 128}
