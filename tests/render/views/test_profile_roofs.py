"""Which ceilings are drawn over a profile."""

import dataclasses

import pytest
from synthetic import profile

from nearpeak.machines import calibrations
from nearpeak.machines.catalogue import find
from nearpeak.profiles.profile import ProfileCeilings
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


def test_a_profile_has_the_roofs_of_its_own_ceilings():
    ceilings = ProfileCeilings(
        bandwidth=4.5e12, cache_bandwidth=1e13, matrix={"bfloat16": 8e14, "float16": 8e14}, vector={"float32": 6e13}
    )
    found = profile_roofs(dataclasses.replace(profile(20), ceilings=ceilings, machine="my-own"), None)
    assert values(found) == {
        "memory": 4.5e12,
        "last-level cache": 1e13,
        "bfloat16, float16 matrix": 8e14,
        "float32 vector": 6e13,
    }
    assert found.origin == "The roofs were measured on this machine."


def test_a_profile_of_an_old_file_has_its_bandwidth_and_the_engines_of_the_catalogue():
    found = profile_roofs(profile(20), find("h200-sxm"))
    assert values(found)["memory"] == 4.7e12
    assert values(found)["tfloat32 matrix"] == find("h200-sxm").achievable.matrix["tfloat32"]
    assert "The roof of the memory is one of them" in found.origin


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


def test_an_unknown_machine_of_an_old_file_has_the_roof_of_its_memory():
    made = dataclasses.replace(profile(20), machine="my-own")
    assert catalogue_machine(made) is None
    found = profile_roofs(made, None)
    assert values(found) == {"memory": 4.7e12}
    assert found.origin == "The machine is not in the catalogue: only the bandwidth of its memory is known."


def test_without_ceilings_and_machine_there_are_no_roofs():
    found = profile_roofs(dataclasses.replace(profile(20), ceilings=None), None)
    assert found.roofs == () and found.origin == ""


def test_the_catalogue_is_asked_for_the_machine():
    assert catalogue_machine(profile(20)).name == find("h200-sxm").name


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


def test_without_ceilings_the_calibration_of_the_machine_counts(kept):
    kept(4.2e12)
    assert calibrated_machine(dataclasses.replace(profile(20), ceilings=None)).achievable.bandwidth == 4.2e12
