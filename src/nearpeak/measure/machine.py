"""What is known of this machine without measuring it: its calibration, else its row of the catalogue."""

from __future__ import annotations

import platform

import torch

from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Machine
from nearpeak.measure.gpu import GpuInstrument, current_gpu


def calibration_key(device: GpuInstrument | None) -> calibrations.CalibrationKey:
    """What a calibration is stored by: the device, its driver and the version of torch. None is this CPU."""
    if device is None:
        driver = f"{platform.system()} {torch.get_num_threads()} threads"
        return calibrations.CalibrationKey(device=detect_cpu().id, driver=driver, torch=torch.__version__)
    driver = device.conditions.driver() or "unknown"
    return calibrations.CalibrationKey(device=device.name, driver=driver, torch=torch.__version__)


def known_machine(device: GpuInstrument | None) -> Machine | None:
    """The calibration of a device, else its row of the catalogue, else None. Nothing is measured."""
    stored = calibrations.load(calibration_key(device))
    if isinstance(stored, calibrations.Calibration):
        return stored.machine
    return catalogue.by_driver_name(device.name) if device is not None else None


def this_machine_key() -> calibrations.CalibrationKey:
    """The calibration key of the current device."""
    return calibration_key(current_gpu())


def this_machine_if_known() -> Machine | None:
    """`known_machine` of the current device."""
    return known_machine(current_gpu())
