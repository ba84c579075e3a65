import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.ops.cost import cost_of
from nearpeak.ops.formulas.convolution import overlap

aten = torch.ops.aten


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def convolve(call, data, weight, bias=None, stride=1, padding=0, dilation=1, transposed=False, groups=1):
    dimensions = weight.dim() - 2
    each = [[value] * dimensions for value in (stride, padding, dilation)]
    return cost_of(call(aten.convolution, data, weight, bias, *each, transposed, [0] * dimensions, groups))


@given(
    line=st.integers(1, 12),
    windows=st.integers(1, 8),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    padding=st.integers(0, 6),
    dilation=st.integers(1, 3),
)
def test_overlap_equals_the_one_counted_by_hand(line, windows, kernel, stride, padding, dilation):
    met = [
        (window, tap, window * stride - padding + tap * dilation)
        for window in range(windows)
        for tap in range(kernel)
        if 0 <= window * stride - padding + tap * dilation < line
    ]
    found = overlap(line, windows, kernel, stride, padding, dilation)
    assert found.taps == len(met)
    assert found.windows * windows == pytest.approx(len({window for window, _, _ in met}))
    assert found.kernel * kernel == pytest.approx(len({tap for _, tap, _ in met}))
    assert found.line * line == pytest.approx(len({position for _, _, position in met}))


def test_direct_form(call):
    cost = convolve(call, empty(2, 3, 9, 9), empty(4, 3, 5, 5), empty(4), stride=2)
    assert cost.family == "convolution"
    assert cost.flops == {"bfloat16": 2 * 2 * 4 * 3 * 25 * 9}
    assert cost.work.bytes_read == 2 * (2 * 3 * 81 + 4 * 3 * 25 + 4)
    assert cost.work.bytes_written == 2 * 2 * 4 * 9


def test_taps_on_padding_are_free(call):
    cost = convolve(call, empty(1, 3, 8), empty(4, 3, 3), padding=1)
    assert cost.flops == {"bfloat16": 2 * 4 * 3 * (8 * 3 - 2)}


def test_three_by_three_is_charged_as_winograd_does_it(call):
    cost = convolve(call, empty(1, 3, 8, 8), empty(4, 3, 3, 3))
    assert cost.flops == {"bfloat16": pytest.approx(2 * 4 * 3 * 9 * 36 / 4)}
    for changed in ({"stride": 2}, {"dilation": 2}):
        windows = 9 if "stride" in changed else 16
        cost = convolve(call, empty(1, 3, 8, 8), empty(4, 3, 3, 3), **changed)
        assert cost.flops == {"bfloat16": 2 * 4 * 3 * 9 * windows}


@pytest.mark.parametrize(
    ("kernel", "saved"),
    [((3,), 1.0), ((3, 3, 3), 27 / 12), ((2, 2), 2.56), ((1, 7), 1.0), ((11, 11), 121 / 12), ((1, 1), 1.0)],
)
def test_the_matrix_engine_is_charged_what_the_best_fast_algorithm_multiplies(call, kernel, saved):
    data, weight = empty(1, 3, *(12,) * len(kernel)), empty(4, 3, *kernel)
    windows = math.prod(13 - size for size in kernel)
    cost = convolve(call, data, weight)
    assert cost.flops == {"bfloat16": pytest.approx(2 * 4 * 3 * math.prod(kernel) * windows / saved)}


def test_time_first(call):
    data, weight = torch.zeros(10, 2, 3), torch.zeros(3, 3, 5)
    cost = cost_of(call(aten.conv_tbc, data, weight, torch.zeros(5), 1))
    taps = 10 * 3 - 2  # two taps fall on the padding
    assert cost.flops == {"tfloat32": 2 * taps * 2 * 3 * 5}
    assert cost.work.bytes_read == 4 * (60 + 45 + 5)
    assert cost.work.bytes_written == 4 * 10 * 2 * 5


def test_depthwise_is_direct(call):
    cost = convolve(call, empty(1, 4, 8, 8), empty(4, 1, 3, 3), groups=4)
    assert cost.flops == {"bfloat16": 2 * 4 * 9 * 36}


def test_float32_goes_by_the_flag_of_convolutions(call):
    from dataclasses import replace

    op = call(aten.convolution, torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 5, 5), None, [1, 1], [0, 0], [1, 1], False,
              [0, 0], 1)  # fmt: skip
    direct = 2 * 4 * 3 * 25 * 16
    assert cost_of(replace(op, tf32_convolutions=True)).flops == {"tfloat32": direct / 6.25}
    cost = cost_of(replace(op, tf32_convolutions=False))
    assert cost.flops == {}
    assert cost.vector_flops == {"float32": pytest.approx(direct * 1.5 / 25)}


def test_a_stride_beyond_the_kernel_skips_input(call):
    cost = convolve(call, empty(1, 16, 8, 8), empty(4, 16, 1, 1), stride=2)
    assert cost.work.bytes_read == 2 * (16 * 16 + 4 * 16)


def test_taps_that_only_meet_padding_are_not_read(call):
    cost = convolve(call, empty(1, 16, 1, 1), empty(4, 16, 3, 3), padding=1)
    assert cost.work.bytes_read == 2 * (16 + 4 * 16)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_transposed(call, dimensions):
    cost = convolve(call, empty(2, 6, *[4] * dimensions), empty(6, 5, *[2] * dimensions), stride=2, transposed=True)
    assert cost.flops == {"bfloat16": 2 * 2 * 6 * 5 * 8**dimensions}
    assert cost.work.bytes_written == 2 * 2 * 5 * 8**dimensions


def test_groups(call):
    cost = convolve(call, empty(1, 8, 9), empty(6, 4, 2), groups=2)
    assert cost.flops == {"bfloat16": 2 * 6 * 4 * 2 * 8}


def test_an_empty_batch_costs_nothing(call):
    assert convolve(call, empty(0, 3, 8), empty(4, 3, 3)).work.bytes == 0


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_each_gradient_apart(call, mask):
    grad, data, weight = torch.zeros(2, 4, 4), torch.zeros(2, 3, 5), torch.zeros(4, 3, 2)
    op = call(aten.convolution_backward, grad, data, weight, [4], [1], [0], [1], False, [0], 1, list(mask))
    cost = cost_of(op)
    product = 2 * 2 * 4 * 3 * 2 * 4
    assert cost.flops.get("tfloat32", 0) == product * (mask[0] + mask[1])
    assert cost.vector_flops.get("float32", 0) == (2 * 4 * 4 - 4 if mask[2] else 0)
    assert cost.work.bytes_read == 4 * (32 + 24 * mask[0] + 30 * mask[1])
    assert cost.work.bytes_written == 4 * (30 * mask[0] + 24 * mask[1] + 4 * mask[2])


def test_an_expanded_gradient_is_one_number(calls):
    weight = torch.zeros(4, 3, 3, 3, requires_grad=True)

    def step():
        torch.nn.functional.conv2d(torch.zeros(1, 3, 8, 8), weight).sum().backward()

    (op,) = [op for op in calls(step) if op.packet == "aten.convolution_backward"]
    cost = cost_of(op)
    assert cost.work.bytes_read == 4 + 4 * 3 * 64
    assert cost.flops == {"tfloat32": pytest.approx(2 * 4 * 3 * 9 * 36 / 4)}


def test_whole_convolutions_with_named_padding(call):
    with torch.inference_mode():
        data, weight = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 5, 5)
        same = cost_of(call(torch.nn.functional.conv2d, data, weight, padding="same"))
        numbers = cost_of(call(torch.nn.functional.conv2d, data, weight, padding=2))
        assert same.flops == numbers.flops == {"tfloat32": 2 * 4 * 3 * (8 * 5 - 6) ** 2 / 6.25}
        alone = cost_of(call(torch.nn.functional.conv2d, data[0], weight, padding="valid"))
        assert alone.flops == {"tfloat32": 2 * 4 * 3 * 25 * 16 / 6.25}


def test_the_backward_of_the_plain_kernel_costs_what_every_backward_does(call):
    data, weight, grad = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3), torch.zeros(2, 4, 6, 6)
    slow = call(aten._slow_conv2d_backward.output_mask, grad, data, weight, [3, 3], [1, 1], [0, 0], [True, True, True])
    usual = call(aten.convolution_backward, grad, data, weight, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
                 [True, True, True])  # fmt: skip
    assert cost_of(slow).flops == cost_of(usual).flops
    assert cost_of(slow).work == cost_of(usual).work
