import dataclasses

import pytest
import torch

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
        bandwidth = 1e10 + made.count("ceilings")
        made.append("ceilings")
        progress("memory: copy")
        return Achievable(how="measured", note="made up", bandwidth=bandwidth, matrix={}, vector={"float32": 1e11})

    def efficiency(found, progress):
        made.append("kernels")
        points = {"pointwise": (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)}
        return dataclasses.replace(found, achievable=dataclasses.replace(found.achievable, efficiency=points))

    monkeypatch.setattr(module, "calibrate_host", calibrate)
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


def only_file(tmp_path):
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    return file


def test_the_first_call_measures_and_later_ones_read(here):
    lines = []
    first = machine(progress=lines.append)
    assert first.kind == "cpu"
    assert first.achievable.bandwidth == 1e10
    assert lines == ["measuring this machine, once", "memory: copy"]
    lines.clear()
    assert machine(progress=lines.append) == first
    assert here == ["ceilings", "kernels"]
    assert lines == []


def test_calibrating_again_measures_and_replaces(here):
    machine()
    assert machine(calibrate=True).achievable.bandwidth == 1e10 + 1
    assert machine().achievable.bandwidth == 1e10 + 1
    assert here.count("ceilings") == 2


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"schema": 1}', None])
def test_a_damaged_file_is_measured_again_and_said(here, tmp_path, damage):
    machine()
    file = only_file(tmp_path)
    text = file.read_text()
    file.write_text(text.replace("10000000000.0", "99000000000.0") if damage is None else damage)
    lines = []
    assert machine(progress=lines.append).achievable.bandwidth == 1e10 + 1
    assert lines[0].startswith(f"{file} is not used: ")
    assert machine().achievable.bandwidth == 1e10 + 1
    assert here.count("ceilings") == 2


def test_another_number_of_threads_is_another_machine(here, monkeypatch):
    machine()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert machine().achievable.bandwidth == 1e10 + 1


def test_another_torch_is_another_machine(here, monkeypatch):
    machine()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert machine().achievable.bandwidth == 1e10 + 1


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(here, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file where a folder should be")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "taken"))
    lines = []
    assert machine(progress=lines.append).achievable.bandwidth == 1e10
    assert lines[-1].startswith("the calibration is not saved: ")
