"""What a profile says of the calibration of its machine: doubts about what it uses, and what was not measured."""

import dataclasses

import made_up
import pytest

from nearpeak.machines import catalogue
from nearpeak.machines.machine import Ceiling
from nearpeak.profiles.profile import calibration_notes, computed_dtypes, profile_ceilings


@pytest.fixture
def estimate():
    """Of a product in bfloat16."""
    op = dataclasses.replace(made_up.op("aten.mm.default", 1.0), engine="matrix", dtype="bfloat16")
    return dataclasses.replace(made_up.estimate([op]), expected_from="the reference")


def quick(*measured, kind="gpu"):
    """A GPU of which only these peaks were measured."""
    listed = catalogue.find("h200-sxm")
    ceilings = {f"matrix.{dtype}": Ceiling(value=1e14, spread=2.0, how="") for dtype in measured}
    achievable = dataclasses.replace(listed.achievable, how="measured", quick=True, ceilings=ceilings)
    return dataclasses.replace(listed, kind=kind, achievable=achievable)


def test_a_peak_that_was_not_measured_is_named_if_the_step_uses_it(estimate):
    (note,) = calibration_notes(quick("float8"), estimate)
    assert note.startswith("Derated from the datasheet, not measured: the peak of bfloat16.")
    assert calibration_notes(quick("bfloat16"), estimate) == ()
    assert calibration_notes(catalogue.find("h200-sxm"), estimate) == ()  # all of it is derated, and the report says so


def test_of_a_cpu_the_kernels_of_the_reference_are_named(estimate):
    (note,) = calibration_notes(quick("bfloat16", kind="cpu"), estimate)
    assert note.startswith("What good kernels take was measured on the reference")


def test_doubts_about_a_peak_count_if_the_step_uses_it(estimate):
    assert computed_dtypes(estimate) == {"bfloat16"}
    assert profile_ceilings(quick("float8"), "achievable", computed_dtypes(estimate)).doubts == ()
    doubts = profile_ceilings(quick("bfloat16"), "achievable", computed_dtypes(estimate)).doubts
    assert doubts == ("repeats of matrix.bfloat16 lay 200 % apart",)
