import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.profiles.waterfall import PART_MEANINGS, build_waterfall

TIMES = {
    "wall_s": 10.0,
    "ideal_s": 2.0,
    "fused_s": 3.0,
    "as_written_s": 4.0,
    "modeled_s": 6.0,
    "kernel_s": 7.0,
    "communication_s": 1.0,
}


def test_the_parts_are_the_differences():
    found = build_waterfall(**TIMES)
    assert [part.seconds for part in found.parts] == [2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    assert [part.name for part in found.parts] == list(PART_MEANINGS)


@given(st.fixed_dictionaries({name: st.floats(0, 1e3) for name in TIMES}))
def test_the_parts_sum_to_the_wall_time_whatever_was_measured(times):
    found = build_waterfall(**times)
    assert sum(part.seconds for part in found.parts) == pytest.approx(times["wall_s"], abs=1e-9)


def test_a_kernel_faster_than_its_bound_is_shown_as_a_bug():
    found = build_waterfall(**{**TIMES, "modeled_s": 3.5})
    assert [part.name for part in found.broken] == ["slow kernels"]
    assert found.seconds("slow kernels") == -0.5
    assert build_waterfall(**{**TIMES, "modeled_s": 3.95}).broken == ()  # within what a measurement can be wrong


def test_the_ideal_is_no_loss():
    assert build_waterfall(**{**TIMES, "ideal_s": 2.9}).largest_loss.name in ("slow kernels", "idle")
    assert build_waterfall(**{**TIMES, "wall_s": 20.0}).largest_loss.name == "idle"
