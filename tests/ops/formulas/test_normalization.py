import math

import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

aten = torch.ops.aten
ROWS, COLUMNS = 64, 100
DATA = ROWS * COLUMNS * 4


def work(op):
    return cost_of(op).work


def of(op):
    assert cost_of(op).family == "normalization", op.name
    return work(op).bytes_read, work(op).bytes_written


def data():
    return torch.zeros(ROWS, COLUMNS)


@pytest.mark.parametrize("function", [aten._softmax, aten._log_softmax])
def test_softmax_reads_once_and_writes_once(call, function):
    op = call(function, data(), 1, False)
    assert of(op) == (DATA, DATA)
    assert work(op).vector_flops == {"float32": 3 * ROWS * COLUMNS}


@pytest.mark.parametrize("function", [aten._softmax_backward_data, aten._log_softmax_backward_data])
def test_softmax_backward_reads_gradient_and_output(call, function):
    assert of(call(function, data(), data(), 1, torch.float32)) == (2 * DATA, DATA)


def test_layer_norm_writes_its_statistics(call):
    weight, bias = torch.ones(COLUMNS), torch.zeros(COLUMNS)
    op = call(aten.native_layer_norm, data(), [COLUMNS], weight, bias, 1e-5)
    assert of(op) == (DATA + 2 * COLUMNS * 4, DATA + 2 * ROWS * 4)
    assert work(op).vector_flops == {"float32": 5 * ROWS * COLUMNS}
    assert of(call(aten.native_layer_norm, data(), [COLUMNS], None, None, 1e-5)) == (DATA, DATA + 2 * ROWS * 4)


@pytest.mark.parametrize(
    ("mask", "read", "written"),
    [
        ((True, True, True), 2 * DATA + 2 * ROWS * 4 + COLUMNS * 4, DATA + 2 * COLUMNS * 4),
        ((True, False, False), 2 * DATA + 2 * ROWS * 4 + COLUMNS * 4, DATA),
        ((False, True, True), 2 * DATA + 2 * ROWS * 4, 2 * COLUMNS * 4),  # the weight only scales the input's gradient
        ((False, False, True), DATA, COLUMNS * 4),  # the bias sums the gradient alone
    ],
)
def test_layer_norm_backward_does_what_is_asked_for(call, mask, read, written):
    weight, bias = torch.ones(COLUMNS), torch.zeros(COLUMNS)
    mean, deviation = torch.zeros(ROWS, 1), torch.ones(ROWS, 1)
    op = call(aten.native_layer_norm_backward, data(), data(), [COLUMNS], mean, deviation, weight, bias, mask)
    assert of(op) == (read, written)


def test_group_norm(call):
    x, weight, bias = torch.zeros(2, 8, 25), torch.ones(8), torch.zeros(8)
    op = call(aten.native_group_norm, x, weight, bias, 2, 8, 25, 4, 1e-5)
    assert of(op) == (1600 + 64, 1600 + 2 * 2 * 4 * 4)
    mean = torch.zeros(2, 4)
    op = call(aten.native_group_norm_backward, x, x.clone(), mean, mean + 1, weight, 2, 8, 25, 4, [True, True, True])
    assert of(op) == (3200 + 2 * 32 + 32, 1600 + 64)


def by_hand(number, *shape, dtype="float32"):
    strides = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    return Tensor(shape=shape, strides=strides, dtype=dtype, storage=number)


def test_rms_norm():
    """By hand: torch takes it apart on the CPU."""
    x, y = (by_hand(number, ROWS, COLUMNS, dtype="bfloat16") for number in (0, 1))
    weight, statistic = by_hand(2, COLUMNS, dtype="bfloat16"), by_hand(3, ROWS, 1)
    op = Op(
        name="aten._fused_rms_norm.default",
        arguments={"input": x, "normalized_shape": (COLUMNS,), "weight": weight, "eps": 1e-5},
        outputs=(y, statistic),
    )
    assert of(op) == (DATA / 2 + COLUMNS * 2, DATA / 2 + ROWS * 4)
    assert work(op).vector_flops == {"float32": 3 * ROWS * COLUMNS}
    op = Op(
        name="aten._fused_rms_norm_backward.default",
        arguments={"grad_out": y, "input": x, "rstd": statistic, "weight": weight, "output_mask": (True, True)},
        outputs=(by_hand(4, ROWS, COLUMNS, dtype="bfloat16"), by_hand(5, COLUMNS, dtype="bfloat16")),
    )
    assert of(op) == (DATA + ROWS * 4 + COLUMNS * 2, DATA / 2 + COLUMNS * 2)


CHANNELS = 8
IMAGES = 2 * CHANNELS * 25 * 4


def batch_norm(call, function, training, *extra):
    x = torch.zeros(2, CHANNELS, 25)
    channel = [torch.ones(CHANNELS) for _ in range(4)]
    return call(function, x, *channel, *((training,) if training is not None else ()), 0.1, 1e-5, *extra)


@pytest.mark.parametrize("function", [aten.native_batch_norm, aten._native_batch_norm_legit])
def test_batch_norm_in_training_updates_the_running_statistics(call, function):
    op = batch_norm(call, function, True)
    assert of(op) == (IMAGES + 4 * CHANNELS * 4, IMAGES + 4 * CHANNELS * 4)  # saved and running statistics
    assert work(op).vector_flops == {"float32": 5 * 2 * CHANNELS * 25}


@pytest.mark.parametrize("function", [aten.native_batch_norm, aten._native_batch_norm_legit])
def test_batch_norm_with_given_statistics_only_reads_them(call, function):
    op = batch_norm(call, function, False)
    assert of(op) == (IMAGES + 4 * CHANNELS * 4, IMAGES)
    assert work(op).vector_flops == {"float32": 2 * 2 * CHANNELS * 25}


def test_functional_batch_norm_writes_new_statistics(call):
    op = batch_norm(call, aten._native_batch_norm_legit_functional, True)
    assert of(op) == (IMAGES + 4 * CHANNELS * 4, IMAGES + 4 * CHANNELS * 4)


def test_batch_norm_with_update(call):
    op = batch_norm(call, aten._batch_norm_with_update, None)
    assert of(op) == (IMAGES + 4 * CHANNELS * 4, IMAGES + 4 * CHANNELS * 4)


def cudnn(*, training):
    x, y = (by_hand(number, 2, CHANNELS, 25, dtype="bfloat16") for number in (0, 5))
    names = ("weight", "bias", "running_mean", "running_var")
    arguments = {name: by_hand(number + 1, CHANNELS) for number, name in enumerate(names)}
    reserve = by_hand(8, 10**6, dtype="uint8")
    return Op(
        name="aten.cudnn_batch_norm.default",
        arguments={"input": x, **arguments, "training": training},
        outputs=(y, by_hand(6, CHANNELS), by_hand(7, CHANNELS), reserve),
    )


def test_what_cudnn_reserves_is_not_charged():
    op = cudnn(training=True)
    assert of(op) == (IMAGES / 2 + 4 * CHANNELS * 4, IMAGES / 2 + 4 * CHANNELS * 4)


@pytest.mark.parametrize(
    ("train", "mask", "read"),
    [
        (True, (True, True, True), 2 * IMAGES + 3 * CHANNELS * 4),
        (True, (True, False, False), 2 * IMAGES + 3 * CHANNELS * 4),
        (False, (True, False, False), IMAGES + 2 * CHANNELS * 4),  # given statistics: the input is not needed
        (False, (True, True, True), 2 * IMAGES + 3 * CHANNELS * 4),
        (True, (False, False, True), IMAGES),
    ],
)
def test_batch_norm_backward(call, train, mask, read):
    x, gradient = torch.zeros(2, CHANNELS, 25), torch.zeros(2, CHANNELS, 25)
    channel = [torch.ones(CHANNELS) for _ in range(5)]
    op = call(aten.native_batch_norm_backward, gradient, x, *channel, train, 1e-5, mask)
    assert of(op) == (read, mask[0] * IMAGES + (mask[1] + mask[2]) * CHANNELS * 4)


def test_weight_norm(call):
    v, g = torch.ones(16, 50), torch.ones(16, 1)
    op = call(aten._weight_norm_interface, v, g)
    assert of(op) == (3200 + 64, 3200 + 64)


def test_a_whole_layer_norm_step(calls):
    module = torch.nn.LayerNorm(COLUMNS)
    x = data().requires_grad_()
    ops = [op for op in calls(lambda: module(x).sum().backward()) if "layer_norm" in op.name]
    assert [op.packet for op in ops] == ["aten.native_layer_norm", "aten.native_layer_norm_backward"]
    # the gradient of a sum is one number, expanded
    assert of(ops[1]) == (DATA + 4 + 2 * ROWS * 4 + COLUMNS * 4, DATA + 2 * COLUMNS * 4)


def test_renorm_reads_all_and_in_place_may_write_nothing(call):
    x = torch.randn(10, 10)
    assert cost_of(call(torch.renorm, x, 2, 0, 1.0)).work.bytes == 800
    assert cost_of(call(aten.renorm_, x.clone(), 2, 0, 1.0)).work.bytes == 400
