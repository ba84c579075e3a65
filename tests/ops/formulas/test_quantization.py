import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

aten = torch.ops.aten


def tensor(number, shape, dtype):
    strides = tuple(torch.empty(shape, device="meta").stride())
    return Tensor(shape=shape, strides=strides, dtype=dtype, storage=number)


def test_quantize_and_back():
    whole, small = tensor(0, (4, 8), "float32"), tensor(1, (4, 8), "qint8")
    cost = cost_of(Op(name="aten.quantize_per_tensor.default", arguments={"self": whole}, outputs=(small,)))
    assert (cost.family, cost.work.bytes_read, cost.work.bytes_written) == ("quantization", 128, 32)
    assert cost.vector_flops == {"float32": 32}
    cost = cost_of(Op(name="aten.dequantize.self", arguments={"self": small}, outputs=(whole,)))
    assert (cost.work.bytes_read, cost.work.bytes_written) == (32, 128)


def test_per_channel_scales_are_read(call):
    operator = torch.ops.quantized_decomposed.quantize_per_channel.default
    zeros = torch.zeros(4, dtype=torch.int64)
    op = call(operator, torch.zeros(4, 8), torch.ones(4), zeros, 0, -128, 127, torch.int8)
    assert cost_of(op).work.bytes_read == 128 + 16 + 32
    assert cost_of(op).work.bytes_written == 32


def test_fake_quantization_writes_its_mask(call):
    cost = cost_of(call(aten.fake_quantize_per_tensor_affine_cachemask, torch.zeros(4, 8), 0.1, 0, 0, 255))
    assert cost.vector_flops == {"float32": 64}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (128, 128 + 32)


def test_fake_quantization_with_a_switch_charges_no_arithmetic(call):
    switch = torch.ones(1, dtype=torch.int64)
    parameters = torch.ones(1), torch.zeros(1, dtype=torch.int32), switch
    operator = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    cost = cost_of(call(operator, torch.zeros(4, 8), *parameters, 0, 255))
    assert cost.vector_flops == {}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (128 + 4 + 4 + 8, 128 + 32)


def test_the_gradient_of_a_learnable_scale(call):
    arguments = torch.zeros(8), torch.zeros(8), torch.ones(1), torch.zeros(1), 0, 255
    cost = cost_of(call(aten._fake_quantize_learnable_per_tensor_affine_backward, *arguments))
    assert cost.vector_flops == {"float32": 16}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (32 + 32 + 4 + 4, 32 + 4 + 4)


def test_the_observer_is_not_charged_for_its_statistics():
    x, on, small, mask = tensor(0, (8,), "float32"), tensor(1, (1,), "int64"), tensor(2, (1,), "float32"), (8,)
    op = Op(
        name="aten._fused_moving_avg_obs_fq_helper.default",
        arguments={"self": x, "observer_on": on, "fake_quant_on": on, "running_min": small},
        outputs=(tensor(3, (8,), "float32"), tensor(4, mask, "bool")),
        mutated=("running_min",),
    )
    assert (cost_of(op).work.bytes_read, cost_of(op).work.bytes_written) == (32, 40)


def test_int8_weights_are_read_as_bytes(call):
    x = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(32, 64, dtype=torch.int8, device="meta")
    scales = torch.empty(32, dtype=torch.bfloat16, device="meta")
    cost = cost_of(call(torch._weight_int8pack_mm, x, weight, scales))
    assert cost.family == "quantization"
    assert cost.flops == {"bfloat16": 2 * 3 * 64 * 32}
    assert cost.work.bytes_read == 2 * 3 * 64 + 32 * 64 + 2 * 32


def test_int4_weights_are_read_packed():
    op = Op(
        name="aten._weight_int4pack_mm.default",
        arguments={
            "self": tensor(0, (3, 256), "bfloat16"),
            "mat2": tensor(1, (4, 2, 32, 4), "int32"),  # 32 rows of 256: 4 bits each
            "qGroupSize": 128,
            "qScaleAndZeros": tensor(2, (2, 32, 2), "bfloat16"),
        },
        outputs=(tensor(3, (3, 32), "bfloat16"),),
    )
    cost = cost_of(op)
    assert cost.flops == {"bfloat16": 2 * 3 * 256 * 32}
    assert cost.work.bytes_read == 2 * 3 * 256 + 32 * 256 / 2 + 2 * 128


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_the_range_may_be_found_on_the_way(call):
    op = call(torch.quantize_per_tensor_dynamic, torch.randn(100), torch.quint8, False)
    assert cost_of(op).work.bytes_read == 400
