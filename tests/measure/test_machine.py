import dataclasses

import pytest
import torch

from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.machine import Achievable
from nearpeak.measure.machine import calibration_key, known_machine

ACHIEVABLE = Achievable(how="measured", note="", bandwidth=4.2e12, matrix={"bfloat16": 7e14}, vector={})


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))


def test_a_cpu_is_known_by_its_calibration_alone():
    assert known_machine(None) is None
    measured = dataclasses.replace(catalogue.find("h200-sxm"), achievable=ACHIEVABLE)
    calibrations.save(measured, calibration_key(None))
    assert known_machine(None) == measured


class FakeGpu:
    """As much of a GPU as its key and its catalogue row need."""

    def __init__(self, name):
        self.name = name
        self.conditions = type("C", (), {"driver": staticmethod(lambda: "570.1")})


def test_a_gpu_that_was_not_calibrated_is_its_row_of_the_catalogue():
    assert known_machine(FakeGpu("NVIDIA H200")) == catalogue.find("h200-sxm")
    assert known_machine(FakeGpu("NVIDIA H999")) is None


def test_a_gpu_that_was_calibrated_is_what_was_measured():
    gpu = FakeGpu("NVIDIA H200")
    measured = dataclasses.replace(catalogue.find("h200-sxm"), achievable=ACHIEVABLE)
    key = calibrations.CalibrationKey(device="NVIDIA H200", driver="570.1", torch=torch.__version__)
    assert isinstance(calibrations.save(measured, key), calibrations.Calibration)
    assert known_machine(gpu) == measured
