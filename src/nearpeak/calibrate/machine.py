"""`machine`: this machine with its ceilings and the efficiency of its kernels, or one of the catalogue."""

from __future__ import annotations

import dataclasses

from nearpeak.calibrate.ceilings import calibrate_gpu, calibrate_host
from nearpeak.calibrate.efficiency import measure_efficiency
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import UsageError
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Machine
from nearpeak.measure.gpu import GpuInstrument, current_gpu
from nearpeak.measure.machine import calibration_key
from nearpeak.measure.options import Progress


def machine(name: str | None = None, *, calibrate: bool = False, progress: Progress | None = None) -> Machine:
    """The machine `name` of the catalogue, or this one, measured.

    The first call on a machine measures its ceilings and the efficiency of its kernels, and stores the result for this
    device, driver and torch version; later calls read it. `calibrate` measures again. A stored file that is damaged or
    belongs to another machine is replaced by a new measurement.

    >>> machine("h100-sxm").theoretical.bandwidth
    3350000000000.0
    """
    if name is not None:
        return catalogue.find(name)
    say = progress or (lambda line: None)
    device = current_gpu()
    key = calibration_key(device)
    if not calibrate:
        stored = calibrations.load(key)
        if isinstance(stored, calibrations.Calibration):
            return stored.machine
        if stored is not None:
            say(f"{stored.path} is not used: {stored.reason}")
        say("measuring this machine, once")
    with preserve_process_state():
        achievable = calibrate_host(say) if device is None else calibrate_gpu(device.index, say)
        measured = measure_efficiency(dataclasses.replace(_describe(device), achievable=achievable), say)
    saved = calibrations.save(measured, key)
    if isinstance(saved, calibrations.UnusableFile):
        say(f"the calibration is not saved: {saved.path} {saved.reason}")
    return measured


def known_machine() -> Machine | None:
    """This machine as far as it is known without a measurement: calibrated before, or a GPU of the catalogue."""
    device = current_gpu()
    stored = calibrations.load(calibration_key(device))
    if isinstance(stored, calibrations.Calibration):
        return stored.machine
    return None if device is None else catalogue.by_driver_name(device.name)


def machine_of_file(path: object, device: str, on: str | Machine | None) -> Machine:
    """The machine `on`; without it the one of the catalogue that a file was recorded on."""
    if on is not None:
        return on if isinstance(on, Machine) else catalogue.find(on)
    known = catalogue.by_driver_name(device)
    if known is None:
        raise UsageError(
            f"{path} was recorded on {device!r}, which is not in the catalogue. Name a machine with --on (on= in "
            "Python); `nearpeak machine --list` has them all."
        )
    return known


def _describe(device: GpuInstrument | None) -> Machine:
    """The machine as its datasheet or its driver describes it, without measured ceilings."""
    if device is None:
        return detect_cpu()
    known = catalogue.by_driver_name(device.name)
    if known is not None:
        return known
    properties = device.properties
    return Machine(
        id=device.name.lower().replace(" ", "-"),
        name=device.name,
        kind="gpu",
        vendor=device.backend.vendor,
        architecture=properties.architecture,
        processors=properties.processors,
        memory_bytes=properties.memory_bytes,
        cache_bytes=properties.cache_bytes,
        sources={"memory_bytes": "the driver", "processors": "the driver", "cache_bytes": "the driver"},
    )
