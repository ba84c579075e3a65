"""Which ceilings are drawn over a profile."""

import dataclasses

import pytest
from synthetic import profile

from nearpeak.machines import calibrations
from nearpeak.machines.catalogue import find
from nearpeak.render.views.profile_roofs import calibrated_machine, catalogue_machine, profile_roofs


def values(roofs):
    return {roof.name: roof.value for roof in roofs.roofs}


def test_a_measured_machine_has_its_own_roofs():
    machine = find("h200-sxm")
    measured = dataclasses.replace(machine.achievable, how="measured", bandwidth=4.5e12, cache_bandwidth=1e13)
    found = profile_roofs(profile(20), dataclasses.replace(machine, achievable=measured))
    assert values(found)["memory"] == 4.5e12
    assert values(found)["last-level cache"] == 1e13
    assert found.origin == "The roofs were measured on this machine."


def test_the_bandwidth_of_a_measured_profile_comes_from_its_rates():
    found = profile_roofs(profile(20), find("h200-sxm"))
    assert values(found)["memory"] == pytest.approx(1.41e12 / 0.3)
    assert "The roofs of the memory and of the products of this step are those" in found.origin


def test_dtypes_with_the_same_rate_share_a_roof_and_the_fastest_is_first():
    found = profile_roofs(profile(20), find("h200-sxm"))
    names = [roof.name for roof in found.roofs]
    assert "bfloat16, float16 matrix" in names
    assert names.index("float8, int8 matrix") < names.index("bfloat16, float16 matrix") < names.index("float64 vector")
    rates = [roof.value for roof in found.roofs if roof.kind in ("matrix", "vector")]
    assert rates == sorted(rates, reverse=True)


def test_a_profile_against_a_datasheet_is_drawn_against_it():
    machine = find("h200-sxm")
    found = profile_roofs(dataclasses.replace(profile(20), how="datasheet"), machine)
    assert values(found)["memory"] == machine.theoretical.bandwidth


def test_an_unknown_machine_has_the_roofs_that_the_rates_tell():
    made = dataclasses.replace(profile(20), machine="my-own")
    assert catalogue_machine(made) is None
    found = profile_roofs(made, None)
    assert values(found)["memory"] == pytest.approx(1.41e12 / 0.3)
    assert values(found)["products of this step"] == pytest.approx(3e14 / 0.33)


def test_without_rates_there_are_no_roofs():
    found = profile_roofs(dataclasses.replace(profile(20), rates=None), None)
    assert found.roofs == () and found.origin == ""


def test_the_catalogue_is_asked_for_the_machine():
    assert catalogue_machine(profile(20)).name == find("h200-sxm").name


def test_the_rate_of_products_comes_from_their_bounds():
    made = profile(20)
    assert all(op.flops / op.bound_s == pytest.approx(9e14) for op in made.ops if op.family == "matrix")
    found = values(profile_roofs(made, find("h200-sxm")))
    assert found["bfloat16, float16 matrix"] == pytest.approx(9e14)
    assert found["tfloat32 matrix"] == find("h200-sxm").achievable.matrix["tfloat32"]


def test_a_rate_that_may_be_of_two_roofs_changes_none():
    made = profile(20)
    slow = [dataclasses.replace(op, flops=6.3e13 * op.bound_s) for op in made.ops]  # float32, or float64
    found = values(profile_roofs(dataclasses.replace(made, ops=tuple(slow)), find("h200-sxm")))
    achievable = find("h200-sxm").achievable
    assert found["float64 matrix"] == achievable.matrix["float64"]
    assert found["float32 vector"] == achievable.vector["float32"]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keeps a calibration of an H200 with a bandwidth."""
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))

    def keep(bandwidth, driver="1"):
        machine = find("h200-sxm")
        achievable = dataclasses.replace(machine.achievable, how="measured", bandwidth=bandwidth)
        key = calibrations.CalibrationKey(device="NVIDIA H200", driver=driver, torch="2.13")
        assert isinstance(
            calibrations.save(dataclasses.replace(machine, achievable=achievable), key), calibrations.Calibration
        )

    return keep


def test_the_calibration_that_the_bounds_are_against_is_found(kept):
    made = profile(20)
    assert calibrated_machine(made) is None
    kept(4.2e12)
    assert calibrated_machine(made) is None
    kept(4.7e12, driver="2")
    assert calibrated_machine(made).achievable.bandwidth == 4.7e12
    assert calibrated_machine(dataclasses.replace(made, machine="h100-sxm")) is None
    assert calibrated_machine(dataclasses.replace(made, how="derated")) is None


def test_without_rates_the_calibration_of_the_machine_counts(kept):
    kept(4.2e12)
    assert calibrated_machine(dataclasses.replace(profile(20), rates=None)).achievable.bandwidth == 4.2e12
