import dataclasses

import pytest
import torch

from nearpeak.calibrate import ceilings
from nearpeak.calibrate import machine as module
from nearpeak.calibrate.machine import machine
from nearpeak.errors import UnknownMachine
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Achievable, EfficiencyPoint


@pytest.fixture
def here(tmp_path, monkeypatch):
    """This machine as a CPU with an empty cache folder and made-up measurements, which are listed."""
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = []

    def calibrate(progress):
        made.append("ceilings")
        return Achievable(how="measured", note="made up", bandwidth=1e10, matrix={}, vector={"float32": 1e11})

    def efficiency(found, progress):
        made.append("kernels")
        points = {"pointwise": (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)}
        return dataclasses.replace(found, achievable=dataclasses.replace(found.achievable, efficiency=points))

    monkeypatch.setattr(ceilings, "calibrate_host", calibrate)
    monkeypatch.setattr(module, "measure_efficiency", efficiency)
    return made


def test_a_machine_of_the_catalogue_is_found_and_nothing_is_measured(here):
    assert machine("h200-sxm") == catalogue.find("h200-sxm")
    assert machine("h200-sxm", calibrate=True) == catalogue.find("h200-sxm")
    assert here == []


def test_an_unknown_machine_is_answered_with_the_nearest():
    with pytest.raises(UnknownMachine, match="h100-sxm"):
        machine("h100-sxn")


def test_ceilings_and_kernels_are_measured_once_and_kept(here):
    first = machine()
    assert first.achievable.efficiency["pointwise"] == (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)
    assert machine() == first
    assert here == ["ceilings", "kernels"]
