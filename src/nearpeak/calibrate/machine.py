"""`machine`: this machine with its ceilings and the efficiency of its kernels, or one of the catalogue.

The first call measures quickly what most code needs. What is left has figures of another origin: peaks derated from the
datasheet of a GPU, the efficiency of kernels of a reference CPU. `calibrate=True` measures everything.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import torch

from nearpeak._display import StatusLine
from nearpeak._stage_times import stage
from nearpeak.calibrate.ceilings import QUICK_GPU_SECONDS, calibrate_gpu, calibrate_host
from nearpeak.calibrate.progress import CalibrationProgress
from nearpeak.devices.backends import gpu_visible
from nearpeak.devices.host_load import HostLoad
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import UsageError
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.calibrations import CalibrationKey
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Achievable, Machine
from nearpeak.machines.physics import COMMON_DTYPES, calibration_doubts, is_worth_repeating
from nearpeak.measure.gpu import GpuInstrument, current_gpu
from nearpeak.measure.machine import calibration_key
from nearpeak.measure.options import Progress

_THREADS = " threads"
QUIET_SECONDS = 0.25
QUIET_SHARE = 0.05
"""Of the cores. What others use at most on a quiet machine."""


def machine(
    name: str | None = None, *, calibrate: bool = False, complete: bool = False, progress: Progress | None = None
) -> Machine:
    """The machine `name` of the catalogue, or this one, measured.

    The first call on a machine measures its ceilings, in some ten seconds, and stores the result for this device,
    driver and torch version; later calls read it. `calibrate` measures everything, and again: on a CPU the efficiency
    of its kernels too, in a minute or more; `complete` does so if it was not done before. A stored file that is damaged
    or belongs to another machine is replaced by a new measurement. So is a doubtful one (`calibration_doubts`), as soon
    as nothing else runs on the machine; until then it is used, and what is computed from it says that it is doubtful.

    >>> machine("h100-sxm").theoretical.bandwidth
    3350000000000.0
    """
    if name is not None:
        return catalogue.find(name)
    say = progress or (lambda line: None)
    with stage("runtime of the GPU"):
        device = current_gpu()
        key = calibration_key(device)
    reason = "as asked"
    if not calibrate:
        stored = calibrations.load(key)
        if isinstance(stored, calibrations.Calibration):
            known = stored.machine
            if is_worth_repeating(known):
                doubt = f"doubtful: {calibration_doubts(known, COMMON_DTYPES[known.kind])[0]}"
                if not is_quiet():
                    say(f"the calibration of this machine is {doubt}. It is measured again when nothing else runs")
                    return known
                reason = f"again, the last was {doubt}"
            elif complete and known.achievable is not None and known.achievable.quick:
                reason = "all of it, for predictions"
            else:
                return known
        elif stored is not None:
            say(f"{stored.path} is not used: {stored.reason}")
            reason = "again, its file is not used"
        else:
            reason = _why_unknown(key)
    measured = _measure(device, say, reason, quick=not (calibrate or complete))
    saved = calibrations.save(measured, key)
    if isinstance(saved, calibrations.UnusableFile):
        say(f"the calibration is not saved: {saved.path} {saved.reason}")
    return measured


def _why_unknown(key: CalibrationKey) -> str:
    """What differs from the calibrations that there are."""
    others = [calibration.key for calibration in calibrations.load_all()]
    same_device = [other for other in others if other.device == key.device]
    if not same_device:
        return f"first time on {key.device}" if others else "first time"
    if all(other.torch != key.torch for other in same_device):
        return f"torch is now {key.torch}, was {same_device[0].torch}"
    before = next(other for other in same_device if other.torch == key.torch)
    if key.driver.endswith(_THREADS) and before.driver.endswith(_THREADS):  # of a CPU
        now, then = (other.driver.removesuffix(_THREADS).rpartition(" ")[2] for other in (key, before))
        return f"torch uses {now} thread{'s' * (now != '1')}, {then} before"
    return f"its driver is now {key.driver}, was {before.driver}"


def _measure(device: GpuInstrument | None, say: Progress, reason: str, *, quick: bool) -> Machine:
    """This machine with what was measured; where that was quick, with derated figures of a GPU for the rest."""
    host = HostLoad()
    begun = host.read()
    described = _describe(device)
    later_s = 0.0
    if device is None and not quick:
        # What traces the probes takes as long to import as torch, and a quick calibration has no probes.
        from nearpeak.calibrate.efficiency import efficiency_seconds, measure_efficiency

        later_s = efficiency_seconds()
    progress = CalibrationProgress(
        say,
        f"measuring this machine ({reason})",
        later_s=later_s,
        budget_s=QUICK_GPU_SECONDS if quick and device is not None else None,
    )
    with preserve_process_state():
        if device is None:
            achievable = calibrate_host(progress)
        else:
            ceilings = calibrate_gpu(device.index, progress, quick=quick, all_dtypes=described.theoretical is None)
            achievable = _fill_in(ceilings, described)
        achievable = dataclasses.replace(achievable, quick=quick, others_share=host.shares(begun, host.read()).others)
        measured = dataclasses.replace(described, achievable=achievable)
        if device is None and not quick:  # a GPU's kernels have models, which its ceilings are enough for
            measured = measure_efficiency(measured, progress)
    rest = "; `nearpeak machine --calibrate` measures the rest" if quick else ""
    say(f"measured this machine in {progress.elapsed_s:.0f} s ({reason}){rest}")
    for doubt in calibration_doubts(measured, COMMON_DTYPES[measured.kind])[:1]:
        say(f"this calibration is doubtful: {doubt}")
    return measured


def _fill_in(measured: Achievable, described: Machine) -> Achievable:
    """The ceilings of a GPU with derated ones where none was measured; `ceilings` has only what was."""
    derated = described.achievable
    if derated is None:
        return measured
    return dataclasses.replace(
        measured, matrix={**derated.matrix, **measured.matrix}, vector={**derated.vector, **measured.vector}
    )


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


def start_gpu_calibration(progress: Progress | None = None) -> subprocess.Popen[bytes] | None:
    """Starts to measure the GPU in a process of its own; None without a GPU, or where this torch has a calibration.

    A script may select its GPUs by CUDA_VISIBLE_DEVICES, which has no effect after this process has queried the driver.
    The process imports torch while its parent imports the rest.
    """
    if not gpu_visible():
        return None
    stored = calibrations.load_all()
    if any(known.machine.kind == "gpu" and known.key.torch == torch.__version__ for known in stored):
        return None
    (progress or (lambda line: None))(StatusLine("measuring this machine (first time): it starts"))
    return subprocess.Popen([sys.executable, "-m", "nearpeak", "machine"], stdout=subprocess.DEVNULL)


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
