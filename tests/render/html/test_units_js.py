"""Quantities read the same in the page as in the terminal."""

import random

from javascript import run

from nearpeak.units import percent, quantity, seconds, significant

TIES = [0.125, 0.375, 1.125, 1.375, 12.25, 12.75, 0.5, 1.5, 2.5, 1234.5, 1235.5, 999.5, 0.0625, 1.005e-3, 62.5e-6]
EDGES = [
    0.0,
    1e-3,
    1e-6,
    1e-9,
    9.995e-4,
    9.994e-4,
    9.999e-7,
    999.4,
    999.6,
    1000.0,
    9.999,
    99.95,
    99.96,
    3e-12,
    1e15,
    5e18,
]


def values():
    draw = random.Random(0)
    found = [10 ** draw.uniform(-11, 17) for _ in range(2000)]
    found += [float(f"{value:.3e}") for value in found] + TIES + EDGES
    return found + [-value for value in found[:200] + TIES]


def test_times_read_as_in_the_terminal():
    given = values()
    assert run(["units.js"], "data.map((value) => seconds(value))", given) == [seconds(value) for value in given]


def test_quantities_read_as_in_the_terminal():
    given = values()
    expected = [quantity(value, "FLOP/s", 2) for value in given]
    assert run(["units.js"], 'data.map((value) => quantity(value, "FLOP/s", 2))', given) == expected


def test_shares_read_as_in_the_terminal():
    given = [value for value in values() if abs(value) < 1e4]
    assert run(["units.js"], "data.map((value) => percent(value))", given) == [percent(value) for value in given]
    assert run(["units.js"], "data.map((value) => percent(value, 0))", given) == [percent(value, 0) for value in given]


def test_significant_digits_are_the_same():
    given = values()
    assert run(["units.js"], "data.map((value) => significant(value, 2))", given) == [significant(v, 2) for v in given]


def test_what_is_not_known_is_a_dash():
    assert run(["units.js"], "[seconds(null), seconds(NaN), percent(undefined)]") == ["-", "-", "-"]


def test_counts_have_commas():
    found = run(["units.js"], "data.map(count)", [0, 999, 1000, 1234567])
    assert found == ["0", "999", "1,000", "1,234,567"]
    assert run(["units.js"], "[counted(1, 'op'), counted(2000, 'op')]") == ["1 op", "2,000 ops"]


def test_counts_have_commas_before_the_point_alone():
    given = [0, 999, 1000, 1234567, 1.2345, 41.625, 12345.678]
    expected = ["0", "999", "1,000", "1,234,567", "1.2345", "41.625", "12,345.678"]
    assert run(["units.js"], "data.map((value) => count(value))", given) == expected
