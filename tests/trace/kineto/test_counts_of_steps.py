"""An optimizer counts its steps in single numbers, whose dtype a file may show nowhere."""

from typing import Any

from nearpeak.trace.kineto.read import read_trace

SHAPE = [512, 512]


def test_an_optimizer_whose_counts_have_no_dtype_in_the_file(write_trace: Any, make: Any):
    members = [[SHAPE]] * 4 + [[]] + [[[]]]
    strides = [[[512, 1]]] * 4 + [[]] + [[[]]]
    event = make.span(
        "aten::_fused_adamw_",
        110,
        30,
        **{
            "Input Dims": members + [[]] * 9,
            "Input Strides": strides + [[]] * 9,
            "Input type": [*["TensorList"] * 6, *["Scalar"] * 7, "", ""],
            "Concrete Inputs": [*[""] * 6, "0.001", "0.9", "0.999", "0.01", "1e-08", "False", "False", "", ""],
        },
    )
    op = read_trace(write_trace(make.tensor_op("aten::exp", 0, 10, SHAPE), event)).trace.ops[-1]
    assert op.name == "aten._fused_adamw_.default"
    assert [tensor.dtype for tensor in op.tensors("state_steps")] == ["float32"]
