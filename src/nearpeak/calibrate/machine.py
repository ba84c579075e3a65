"""`machine`: this machine with its ceilings and the efficiency of its kernels, or one of the catalogue."""

from __future__ import annotations

import dataclasses
import time

from nearpeak.calibrate.ceilings import calibrate_gpu, calibrate_host
from nearpeak.calibrate.efficiency import measure_efficiency
from nearpeak.devices.host_load import HostLoad
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import UsageError
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Machine
from nearpeak.machines.physics import calibration_doubts, is_worth_repeating
from nearpeak.measure.gpu import GpuInstrument, current_gpu
from nearpeak.measure.machine import calibration_key
from nearpeak.measure.options import Progress

QUIET_SECONDS = 0.25
QUIET_SHARE = 0.05
"""Of the cores. What others use at most on a quiet machine."""


def machine(name: str | None = None, *, calibrate: bool = False, progress: Progress | None = None) -> Machine:
    """The machine `name` of the catalogue, or this one, measured.

    The first call on a machine measures its ceilings and the efficiency of its kernels, and stores the result for this
    device, driver and torch version; later calls read it. `calibrate` measures again. A stored file that is damaged or
    belongs to another machine is replaced by a new measurement. So is a doubtful one (`calibration_doubts`), as soon as
    nothing else runs on the machine; until then it is used, and what is computed from it says that it is doubtful.

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
            if not is_worth_repeating(stored.machine):
                return stored.machine
            doubt = f"the stored calibration of this machine is doubtful: {calibration_doubts(stored.machine)[0]}"
            if not is_quiet():
                say(f"{doubt}. It is measured again when nothing else runs")
                return stored.machine
            say(f"{doubt}. Measuring again")
        elif stored is not None:
            say(f"{stored.path} is not used: {stored.reason}")
            say("measuring this machine, once")
        else:
            say("measuring this machine, once")
    host = HostLoad()
    begun = host.read()
    with preserve_process_state():
        achievable = calibrate_host(say) if device is None else calibrate_gpu(device.index, say)
        achievable = dataclasses.replace(achievable, others_share=host.shares(begun, host.read()).others)
        measured = dataclasses.replace(_describe(device), achievable=achievable)
        if device is None:  # a GPU's kernels have models, which its ceilings are enough for
            measured = measure_efficiency(measured, say)
    for doubt in calibration_doubts(measured)[:1]:
        say(f"this calibration is doubtful: {doubt}")
    saved = calibrations.save(measured, key)
    if isinstance(saved, calibrations.UnusableFile):
        say(f"the calibration is not saved: {saved.path} {saved.reason}")
    return measured


def is_quiet() -> bool:
    """Whether other processes leave the cores alone, as far as a quarter of a second tells; False if nobody counts."""
    host = HostLoad()
    begun = host.read()
    time.sleep(QUIET_SECONDS)
    others = host.shares(begun, host.read()).others
    return others is not None and others <= QUIET_SHARE


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
