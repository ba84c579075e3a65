import math

import pytest
import torch

from nearpeak.ops.cost import cost_of


def test_complex(call):
    cost = cost_of(call(torch.fft.fft, torch.zeros(3, 8, dtype=torch.complex64)))
    assert cost.family == "fourier"
    assert cost.vector_flops == {"float32": 3 * 2 * 8 * 3}
    assert cost.work.bytes_read == cost.work.bytes_written == 3 * 8 * 8


def test_real_forward_writes_half_a_spectrum(call):
    cost = cost_of(call(torch.fft.rfft, torch.zeros(16, dtype=torch.float64)))
    assert cost.vector_flops == {"float64": 16 * 4 - 16}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (16 * 8, 9 * 16)


def test_real_backward_counts_the_points_of_its_result(call):
    cost = cost_of(call(torch.fft.irfft, torch.zeros(9, dtype=torch.complex64)))
    assert cost.vector_flops == {"float32": 16 * 4 - 16}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (9 * 8, 16 * 4)


def test_more_dimensions_are_one_transform_of_all_points(call):
    cost = cost_of(call(torch.fft.fft2, torch.zeros(5, 4, 8, dtype=torch.complex64)))
    assert cost.vector_flops == {"float32": 5 * 32 * 2 * 5}


def test_one_point_is_a_copy(call):
    cost = cost_of(call(torch.fft.fft, torch.zeros(3, 1, dtype=torch.complex64)))
    assert cost.vector_flops == {}
    assert cost.work.bytes_read == 24


def test_nothing_costs_nothing(call):
    nothing = torch.empty(0, 8, dtype=torch.complex64, device="meta")  # MKL raises an error
    assert cost_of(call(torch.fft.fft, nothing)).work.bytes == 0


@pytest.mark.parametrize("exponent", range(1, 21))
def test_the_charge_is_never_above_split_radix(call, exponent):
    n = 2**exponent
    fewest = min(4 * n * exponent - 6 * n + 8, math.inf if n < 64 else 34 / 9 * n * exponent - 124 / 27 * n)
    flops = cost_of(call(torch.fft.fft, torch.empty(n, dtype=torch.complex64, device="meta"))).vector_flops
    assert flops["float32"] <= fewest
    flops = cost_of(call(torch.fft.rfft, torch.empty(n, device="meta"))).vector_flops
    assert flops.get("float32", 0) <= 2 * n * exponent - 4 * n + 6
    assert flops.get("float32", 0) <= max(fewest / 2, 2 * n * exponent - 4 * n + 6)
