import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.ops.cost import cost_of
from nearpeak.ops.formulas import pooling

aten = torch.ops.aten
functional = torch.nn.functional
IMAGE = 2 * 3 * 16 * 16


def work(op):
    return cost_of(op).work


def of(op):
    assert cost_of(op).family == "pooling", op.name
    return work(op).bytes_read, work(op).bytes_written


def image(*size):
    return torch.zeros(2, 3, *(size or (16, 16)))


def test_max_pool_writes_values_and_indices(call):
    op = call(aten.max_pool2d_with_indices, image(), [2, 2])
    assert of(op) == (IMAGE * 4, IMAGE / 4 * (4 + 8))
    assert work(op).vector_flops == {"float32": IMAGE * 3 / 4}


def test_a_stride_beyond_the_window_skips_input(call):
    op = call(aten.avg_pool2d, image(), [1, 1], [2, 2])
    assert of(op) == (IMAGE / 4 * 4, IMAGE / 4 * 4)
    assert work(op).vector_flops == {}


def test_dilation_and_padding(call):
    op = call(aten.max_pool2d_with_indices, image(), [2, 2], [4, 4], [0, 0], [2, 2])  # positions 0 and 2 of every 4
    assert of(op)[0] == 2 * 3 * 8 * 8 * 4
    op = call(aten.max_pool2d_with_indices, image(), [3, 3], [2, 2], [1, 1])
    assert of(op) == (IMAGE * 4, 2 * 3 * 8 * 8 * 12)


def test_one_number_stands_for_all_dimensions(call):
    assert of(call(aten.avg_pool3d, image(8, 8, 8), [2])) == (2 * 3 * 512 * 4, 2 * 3 * 64 * 4)


@given(
    size=st.integers(1, 30),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 7),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 3),
)
def test_touched_is_what_a_gradient_reaches(size, kernel, stride, padding, dilation):
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if outputs < 1:
        return
    reached = torch.zeros(size, dtype=torch.bool)
    for window in range(outputs):
        for step in range(kernel):
            position = window * stride - padding + step * dilation
            if 0 <= position < size:
                reached[position] = True
    assert pooling.touched(size, outputs, kernel, stride, padding, dilation) == int(reached.sum())


def test_gradients_of_pools_do_not_read_the_input(call):
    indices = torch.zeros(2, 3, 8, 8, dtype=torch.int64)
    small = image(8, 8)
    op = call(aten.max_pool2d_with_indices_backward, small, image(), [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    assert of(op) == (IMAGE / 4 * 12, IMAGE * 4)
    op = call(aten.avg_pool2d_backward, small, image(), [2, 2], [2, 2], [0, 0], False, True, None)
    assert of(op) == (IMAGE / 4 * 4, IMAGE * 4)
    assert of(call(aten._adaptive_avg_pool2d_backward, small, image())) == (IMAGE / 4 * 4, IMAGE * 4)


def test_adaptive_pools_read_everything(call):
    op = call(aten._adaptive_avg_pool2d, image(), [5, 5])
    assert of(op) == (IMAGE * 4, 2 * 3 * 25 * 4)
    assert of(call(aten.adaptive_max_pool2d, image(), [5, 5])) == (IMAGE * 4, 2 * 3 * 25 * 12)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_larger_images_read_all(calls, mode):
    op = calls(functional.interpolate, image(), scale_factor=2.0, mode=mode)[0]
    assert of(op) == (IMAGE * 4, IMAGE * 16)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_smaller_images_read_one_element_per_result_at_the_least(calls, mode):
    op = calls(functional.interpolate, image(), size=(4, 4), mode=mode)[0]
    assert of(op) == (2 * 3 * 16 * 4, 2 * 3 * 16 * 4)


def test_an_uneven_scale_may_skip_the_last_row(calls):
    x = torch.arange(19.0).reshape(1, 1, 19)
    op = calls(functional.interpolate, x, scale_factor=1.05, mode="nearest")[0]
    used = functional.interpolate(x, scale_factor=1.05, mode="nearest").unique().numel()
    assert of(op)[0] == used * 4 == 18 * 4


def test_smoothed_interpolation_reads_all(calls):
    op = calls(functional.interpolate, image(), size=(4, 4), mode="bilinear", antialias=True)[0]
    assert of(op) == (IMAGE * 4, 2 * 3 * 16 * 4)


def test_interpolation_backward(calls):
    x = image().requires_grad_()
    ops = calls(lambda: functional.interpolate(x, scale_factor=2.0).backward(image(32, 32)))
    op = next(op for op in ops if "backward" in op.name)
    assert of(op) == (IMAGE * 16, IMAGE * 4)


def test_a_grid_chooses_what_is_read(call):
    grid = torch.zeros(2, 8, 8, 2)
    assert of(call(aten.grid_sampler_2d, image(), grid, 0, 0, False)) == (2 * 64 * 8, 2 * 3 * 64 * 4)
    op = call(aten.grid_sampler_2d_backward, image(8, 8), image(), grid, 0, 0, False, [True, True])
    assert of(op) == (2 * 3 * 64 * 4 + 2 * 64 * 8, IMAGE * 4 + 2 * 64 * 8)


def test_fractional_windows_touch_a_window_and_a_place_for_each_further_result(call):
    x, samples = torch.randn(1, 2, 32, 32), torch.rand(1, 2, 2)
    values, indices = 2 * 64 * 4, 2 * 64 * 8
    assert of(call(aten.fractional_max_pool2d, x, [2, 2], [8, 8], samples)) == (2 * 81 * 4 + 16, values + indices)
    whole = call(aten.fractional_max_pool2d, x, [2, 2], [31, 31], samples)
    assert of(whole)[0] == 2 * 32 * 32 * 4 + 16


def test_a_grid_is_written_from_its_matrices(call):
    assert of(call(aten.affine_grid_generator, torch.zeros(2, 2, 3), [2, 3, 8, 8], False)) == (48, 2 * 64 * 2 * 4)


def test_one_dimensional_pooling(call):
    op = call(aten.avg_pool2d, torch.zeros(1, 2, 1, 32), [1, 4])
    line = {"self": dataclasses.replace(op.tensor("self"), shape=(1, 2, 32), strides=(64, 32, 1)), "kernel_size": (4,)}
    result = dataclasses.replace(op.outputs[0], shape=(1, 2, 8), strides=(16, 8, 1))
    one = dataclasses.replace(op, name="aten.avg_pool1d.out", arguments=line, outputs=(result,))
    assert of(one) == of(op) == (64 * 4, 16 * 4)
