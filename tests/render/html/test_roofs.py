"""Which ceilings are drawn over a profile."""

import dataclasses

import pytest
from synthetic import profile

from nearpeak.machines.catalogue import find
from nearpeak.render.html.roofs import machine_of, roofs_of


def values(roofs):
    return {roof.name: roof.value for roof in roofs.roofs}


def test_a_measured_machine_has_its_own_roofs():
    machine = find("h200-sxm")
    measured = dataclasses.replace(machine.achievable, how="measured", bandwidth=4.5e12, cache_bandwidth=1e13)
    found = roofs_of(profile(20), dataclasses.replace(machine, achievable=measured))
    assert values(found)["memory"] == 4.5e12
    assert values(found)["last-level cache"] == 1e13
    assert found.origin == "The roofs were measured on this machine."


def test_the_bandwidth_of_a_measured_profile_comes_from_its_rates():
    found = roofs_of(profile(20), find("h200-sxm"))
    assert values(found)["memory"] == pytest.approx(1.41e12 / 0.3)
    assert "The roof of the memory is that one" in found.origin


def test_dtypes_with_the_same_rate_share_a_roof_and_the_fastest_is_first():
    found = roofs_of(profile(20), find("h200-sxm"))
    names = [roof.name for roof in found.roofs]
    assert "bfloat16, float16 matrix" in names
    assert names.index("float8, int8 matrix") < names.index("bfloat16, float16 matrix") < names.index("float64 vector")
    rates = [roof.value for roof in found.roofs if roof.kind in ("matrix", "vector")]
    assert rates == sorted(rates, reverse=True)


def test_a_profile_against_a_datasheet_is_drawn_against_it():
    machine = find("h200-sxm")
    found = roofs_of(dataclasses.replace(profile(20), how="datasheet"), machine)
    assert values(found)["memory"] == machine.theoretical.bandwidth


def test_an_unknown_machine_has_the_roofs_that_the_rates_tell():
    made = dataclasses.replace(profile(20), machine="my-own")
    assert machine_of(made) is None
    found = roofs_of(made, None)
    assert values(found)["memory"] == pytest.approx(1.41e12 / 0.3)
    assert values(found)["products of this step"] == pytest.approx(3e14 / 0.33)


def test_without_rates_there_are_no_roofs():
    found = roofs_of(dataclasses.replace(profile(20), rates=None), None)
    assert found.roofs == () and found.origin == ""


def test_the_catalogue_is_asked_for_the_machine():
    assert machine_of(profile(20)).name == find("h200-sxm").name
