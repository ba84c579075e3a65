import dataclasses

import pytest
import torch

from nearpeak.calibrate import ceilings
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.machine import Achievable
from nearpeak.measure.machine import known_machine, this_machine


@pytest.fixture
def here(tmp_path, monkeypatch):
    """This machine as a CPU with an empty cache folder; the list of calibrations that were made, as bandwidths."""
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = []

    def calibrate(progress):
        made.append(1e10 + len(made))
        progress("memory: copy")
        return Achievable(how="measured", note="made up", bandwidth=made[-1], matrix={}, vector={"float32": 1e11})

    monkeypatch.setattr(ceilings, "calibrate_host", calibrate)
    return made


def only_file(tmp_path):
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    return file


def test_the_first_call_measures_and_later_ones_read(here):
    lines = []
    first = this_machine(progress=lines.append)
    assert first.kind == "cpu"
    assert first.achievable.bandwidth == 1e10
    assert lines == ["measuring this machine, once", "memory: copy"]
    lines.clear()
    assert this_machine(progress=lines.append) == first
    assert here == [1e10]
    assert lines == []


def test_calibrating_again_measures_and_replaces(here):
    this_machine()
    assert this_machine(calibrate=True).achievable.bandwidth == 1e10 + 1
    assert this_machine().achievable.bandwidth == 1e10 + 1
    assert len(here) == 2


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"schema": 1}', None])
def test_a_damaged_file_is_measured_again_and_said(here, tmp_path, damage):
    this_machine()
    file = only_file(tmp_path)
    text = file.read_text()
    file.write_text(text.replace("10000000000.0", "99000000000.0") if damage is None else damage)
    lines = []
    assert this_machine(progress=lines.append).achievable.bandwidth == 1e10 + 1
    assert lines[0].startswith(f"{file} is not used: ")
    assert this_machine().achievable.bandwidth == 1e10 + 1
    assert len(here) == 2


def test_another_number_of_threads_is_another_machine(here, monkeypatch):
    this_machine()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert this_machine().achievable.bandwidth == 1e10 + 1


def test_another_torch_is_another_machine(here, monkeypatch):
    this_machine()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert this_machine().achievable.bandwidth == 1e10 + 1


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(here, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file where a folder should be")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "taken"))
    lines = []
    assert this_machine(progress=lines.append).achievable.bandwidth == 1e10
    assert lines[-1].startswith("the calibration is not kept: ")


def test_what_is_known_without_measuring(here):
    assert known_machine(None) is None
    measured = this_machine()
    assert known_machine(None) == measured
    assert here == [1e10]


class FakeGpu:
    """As much of a GPU as its key and its catalogue row need."""

    def __init__(self, name):
        self.name = name
        self.conditions = type("C", (), {"driver": staticmethod(lambda: "570.1")})


def test_a_gpu_that_was_not_calibrated_is_its_row_of_the_catalogue(here):
    assert known_machine(FakeGpu("NVIDIA H200")) == catalogue.find("h200-sxm")
    assert known_machine(FakeGpu("NVIDIA H999")) is None


def test_a_gpu_that_was_calibrated_is_what_was_measured(here):
    gpu = FakeGpu("NVIDIA H200")
    achievable = Achievable(how="measured", note="", bandwidth=4.2e12, matrix={"bfloat16": 7e14}, vector={})
    measured = dataclasses.replace(catalogue.find("h200-sxm"), achievable=achievable)
    key = calibrations.CalibrationKey(device="NVIDIA H200", driver="570.1", torch=torch.__version__)
    assert isinstance(calibrations.save(measured, key), calibrations.Calibration)
    assert known_machine(gpu) == measured
