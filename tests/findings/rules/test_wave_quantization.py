import dataclasses

import pytest
import torch
from gpu_steps import H200, examined, found_in
from planted import load, planted

from nearpeak.findings.rules.wave_quantization import wave_quantization
from nearpeak.profiles.idle import IdleCause

NAME = "wave-quantization"


def product(rows, columns=2048, depth=8192):
    def build():
        x, weight = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((rows, depth), (depth, columns)))
        return lambda: x @ weight

    return build


def slower(factor):
    return lambda op, expected: factor * expected


SECONDS = {17: 138e-6, 26: 160e-6}
"""What products of so many times 128 rows take on an H200, about."""


def lasting(seconds):
    return lambda op, expected: expected and seconds


def test_the_corpus():
    module = load("wave_quantization")
    step = examined(lambda: module.waste("cuda"), times=slower(1.4))
    (finding,) = found_in(step, NAME)
    assert finding.source == planted("wave_quantization") and finding.places == module.REPEATS
    assert finding.share == pytest.approx(1 - 208 / 256)  # 4096 rows are 256 tiles
    assert "208 tiles of 256 x 128" in finding.evidence and "2 waves, 79 % full" in finding.evidence
    assert "4096 rows" in finding.remedy and "2048 rows" in finding.remedy
    assert not found_in(examined(lambda: module.clean("cuda"), times=slower(1.4)), NAME)


def test_no_more_than_the_empty_places_is_claimed():
    step = examined(product(17 * 128), times=slower(4.0))
    (waste,) = wave_quantization(step)
    assert waste.saving_s == pytest.approx(step.profile.wall_s * (1 - 272 / 384))


def sustaining(rate):
    achievable = dataclasses.replace(H200.achievable, matrix_sustained={"bfloat16": rate})
    return dataclasses.replace(H200, achievable=achievable)


def test_a_filled_machine_at_its_limit_of_power_has_a_lower_clock():
    (free,) = wave_quantization(examined(product(26 * 128), times=slower(1.3)))
    (limited,) = wave_quantization(examined(product(26 * 128), times=slower(1.3), machine=sustaining(5e14)))
    took = examined(product(26 * 128), times=slower(1.3)).profile.wall_s
    assert free.saving_s == pytest.approx(took * (1 - 208 / 256))
    assert limited.saving_s == pytest.approx(took * (1 - (208 / 256) ** (2 / 3)))
    assert "lower clock" in limited.reasoning and "lower clock" not in free.reasoning


def test_at_the_sustained_rate_a_product_does_run():
    flops = 2 * 17 * 128 * 2048 * 8192
    took = examined(product(17 * 128), times=slower(1.6)).profile.wall_s
    rate = flops / (0.75 * took)  # less than 272 of 384 tiles ask for, and more than is left of it at the limit
    (waste,) = wave_quantization(examined(product(17 * 128), times=slower(1.6), machine=sustaining(rate)))
    assert waste.saving_s == pytest.approx(0.25 * took)


def test_products_that_are_a_small_part_of_a_step_keep_their_clock():
    def build():
        step, other = product(26 * 128)(), torch.randn(2048, 1 << 20)
        return lambda: (step(), other + 1)

    step = examined(build, times=slower(1.3), machine=sustaining(5e14))
    (waste,) = wave_quantization(step)
    took = next(op.measured_s for op in step.measured if op.name.startswith("aten.mm"))
    assert took * (1 - (208 / 256) ** (2 / 3)) * 1.3 < waste.saving_s < took * (1 - 208 / 256)


def test_fewer_tiles_than_multiprocessors():
    (waste,) = wave_quantization(examined(product(512, 1024), times=slower(2.0)))
    assert "fewer tiles" in waste.title and "1 wave," in waste.evidence
    assert "more rows: 2048 of them" in waste.remedy


@pytest.mark.parametrize(("rows", "least"), [(26, 0.17), (17, 0.25)])
def test_a_good_kernel_of_this_size_loses_the_last_wave_too(rows, least):
    step = examined(product(rows * 128), times=lasting(SECONDS[rows]))
    (waste,) = wave_quantization(step)
    assert waste.saving_s > least * step.profile.wall_s


def test_silent_where_the_kernel_filled_the_machine_by_other_means():
    assert not list(wave_quantization(examined(product(17 * 128), times=slower(272 / 384))))


def test_time_that_clean_steps_take_longer_at_the_lower_clock_shrinks_too():
    step = examined(product(26 * 128), times=lasting(SECONDS[26]), machine=sustaining(5e14))
    (waste,) = wave_quantization(step)
    took = step.profile.wall_s
    longer = (IdleCause(cause="unknown", seconds=0.1 * took, count=0, where="", what=""),)
    profile = dataclasses.replace(step.profile, wall_s=1.1 * took, idle=longer)
    (at_limit,) = wave_quantization(dataclasses.replace(step, profile=profile))
    assert at_limit.saving_s == pytest.approx(1.1 * waste.saving_s)


def test_silent_where_memory_sets_the_time():
    assert not list(wave_quantization(examined(product(16, 2048), times=slower(2.0))))
