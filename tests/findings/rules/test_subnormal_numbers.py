"""Which ops are said to be slow because of subnormal numbers, and what stays slow with fewer rows."""

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu

from nearpeak.findings.what_if import seconds_by_size

TINY = 1e-40


def step(numbers, slower):
    """A product whose op takes so many times as long as a good kernel."""

    def build():
        left, right = numbers(torch.ones(64, 256)), torch.ones(256, 64)
        return lambda: left @ right

    return examined(build, live=True, machine=slow_cpu(), times=lambda op, expected: slower * expected)


def test_a_slow_product_of_subnormal_numbers_takes_as_long_as_another_one_without():
    (found,) = found_in(step(lambda x: x * TINY, 10.0))
    assert found.rule == "subnormal-numbers" and "set_flush_denormal" in found.remedy
    assert found.share == pytest.approx(0.9)
    assert "100.0 % of what aten.mm reads" in found.evidence


@pytest.mark.parametrize(
    "quiet",
    [
        lambda: step(lambda x: x, 10.0),
        lambda: step(lambda x: x * TINY, 1.5),
        lambda: step(lambda x: x * 0.0, 10.0),
    ],
    ids=["normal", "not slow", "zeros"],
)
def test_others_are_not(quiet):
    assert not found_in(quiet(), "subnormal-numbers")


@pytest.mark.parametrize(("slower", "of_size"), [(1.0, 1.0), (4.0, 4.0), (20.0, 1.0)])
def test_what_makes_a_kernel_many_times_slower_does_not_go_with_its_rows(slower, of_size):
    made = step(lambda x: x, slower)
    (product,) = (index for index, op in enumerate(made.ops) if op.packet == "aten.mm")
    expected = made.measured[product].expected_s
    assert seconds_by_size(made, product) == pytest.approx(of_size * expected)
