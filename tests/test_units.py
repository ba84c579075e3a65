from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.units import DTYPE_BYTES, GIB, gibibytes, percent, quantity, seconds, seconds_between, significant

FACTORS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (1.0, "1.00 s"),
        (31.4e-6, "31.4 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (-2.5e-3, "-2.50 ms"),
        (1e-12, "0.00100 ns"),
        (math.inf, "inf s"),
    ],
)
def test_seconds(value: float | None, text: str):
    assert seconds(value) == text


@given(st.floats(min_value=1e-9, max_value=9e17))
def test_quantity_reads_back_to_three_digits(value: float):
    number, unit = quantity(value, "FLOP/s").split(" ")
    assert float(number) * FACTORS[unit.removesuffix("FLOP/s")] == pytest.approx(value, rel=5.01e-3)


@given(st.floats(min_value=1e-9, max_value=9e17))
def test_quantity_uses_the_prefix_that_fits(value: float):
    assert 1 <= float(quantity(value, "B").split(" ")[0]) < 1000


@given(st.floats(min_value=1e-6, max_value=1e6), st.integers(min_value=1, max_value=6))
def test_significant_is_within_half_a_digit(value: float, digits: int):
    text = significant(value, digits)
    assert "e" not in text
    assert float(text) == pytest.approx(value, rel=0.5 * 10.0 ** (1 - digits) * 1.001)


def test_interval_shows_the_digits_it_supports():
    assert seconds_between(2.0e-3, 1.0e-3, 3.0e-3) == "2.0 ms [1.0, 3.0]"
    assert seconds_between(2.00012e-3, 2.00010e-3, 2.00014e-3) == "2.00012 ms [2.00010, 2.00014]"


def test_interval_of_no_width_has_a_width_of_digits():
    assert seconds_between(1.0, 1.0, 1.0) == "1.00000 s [1.00000, 1.00000]"


def test_capacity_is_binary_and_share_is_percent():
    assert gibibytes(80 * GIB) == "80.0 GiB"
    assert gibibytes(None) == "-"
    assert percent(0.0734) == "7.3 %"
    assert percent(0.0) == "0.0 %"
    assert percent(None) == "-"


def test_tensor_float_is_stored_in_four_bytes():
    assert DTYPE_BYTES["tfloat32"] == 4
