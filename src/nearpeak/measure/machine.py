"""`this_machine`: the machine at hand with its measured ceilings."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable

import torch

from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Machine
from nearpeak.measure.cuda import CudaDevice, cuda_device
from nearpeak.measure.options import Progress


def this_machine(
    *,
    calibrate: bool = False,
    progress: Progress | None = None,
    finish: Callable[[Machine, Progress], Machine] | None = None,
) -> Machine:
    """The machine at hand with its ceilings measured.

    A first call on a machine measures it and keeps the result for this device, driver and torch version; later calls
    read that. `calibrate` measures again. A cache file that is damaged or belongs to another machine is measured again.
    `finish` adds to a new measurement before it is kept.
    """
    say = progress or (lambda line: None)
    device = _device()
    key = _key(device)
    if not calibrate:
        found = calibrations.load(key)
        if isinstance(found, calibrations.Calibration):
            return found.machine
        if found is not None:
            say(f"{found.path} is not used: {found.reason}")
        say("measuring this machine, once")
    facts = _facts(device)
    if device is None:
        from nearpeak.calibrate.ceilings import calibrate_host

        achievable = calibrate_host(say)
    else:
        from nearpeak.calibrate.ceilings import calibrate_cuda

        achievable = calibrate_cuda(device.index, say)
    measured = dataclasses.replace(facts, achievable=achievable)
    if finish is not None:
        measured = finish(measured, say)
    kept = calibrations.save(measured, key)
    if isinstance(kept, calibrations.UnusableFile):
        say(f"the calibration is not kept: {kept.path} {kept.reason}")
    return measured


def known_machine(device: CudaDevice | None) -> Machine | None:
    """What is known of a device without measuring it: its calibration, else its row of the catalogue, else None."""
    found = calibrations.load(_key(device))
    if isinstance(found, calibrations.Calibration):
        return found.machine
    return catalogue.by_driver_name(device.name) if device is not None else None


def key_here() -> calibrations.CalibrationKey:
    """What figures of this machine are kept by: its device, its driver and the version of torch."""
    return _key(_device())


def known_here() -> Machine | None:
    """What is known of this machine without measuring it, as `known_machine` says."""
    return known_machine(_device())


def _device() -> CudaDevice | None:
    return cuda_device(torch.cuda.current_device()) if torch.cuda.is_available() else None


def _key(device: CudaDevice | None) -> calibrations.CalibrationKey:
    if device is None:
        facts = detect_cpu()
        return calibrations.CalibrationKey(
            device=facts.id, driver=f"{platform.system()} {torch.get_num_threads()} threads", torch=torch.__version__
        )
    return calibrations.CalibrationKey(
        device=device.name, driver=device.conditions.driver() or "unknown", torch=torch.__version__
    )


def _facts(device: CudaDevice | None) -> Machine:
    """The machine as its datasheet or the system describes it; its measured ceilings come on top."""
    if device is None:
        return detect_cpu()
    known = catalogue.by_driver_name(device.name)
    if known is not None:
        return known
    properties = torch.cuda.get_device_properties(device.index)
    return Machine(
        id=device.name.lower().replace(" ", "-"),
        name=device.name,
        kind="gpu",
        vendor="amd" if torch.version.hip else "nvidia",
        architecture=f"compute capability {properties.major}.{properties.minor}",
        processors=properties.multi_processor_count,
        memory_bytes=float(device.memory_bytes),
        cache_bytes=float(device.cache_bytes) or None,
        sources={"memory_bytes": "the driver", "processors": "the driver", "cache_bytes": "the driver"},
    )
