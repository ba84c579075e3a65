"""`machine`: this machine with its ceilings and the efficiency of its kernels, or one of the catalogue."""

from __future__ import annotations

from pathlib import Path

from nearpeak.calibrate.efficiency import measure_efficiency
from nearpeak.errors import UsageError
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Machine
from nearpeak.measure.machine import this_machine
from nearpeak.measure.options import Progress


def machine_of_file(path: str | Path, device: str, on: str | Machine | None) -> Machine:
    """The machine that was asked for, or that of the catalogue that a file was recorded on."""
    if on is not None:
        return on if isinstance(on, Machine) else catalogue.find(on)
    known = catalogue.by_driver_name(device)
    if known is None:
        raise UsageError(
            f"{path} was recorded on {device!r}, which is not in the catalogue. Name a machine with --on (on= in "
            "Python); `nearpeak machine --list` has them all."
        )
    return known


def machine(name: str | None = None, *, calibrate: bool = False, progress: Progress | None = None) -> Machine:
    """The machine `name` of the catalogue, or this one, measured.

    A first call on a machine measures its ceilings and what kernels reach of them, and keeps the result for this
    device, driver and torch version; later calls read that. `calibrate` measures again. A cache file that is damaged or
    belongs to another machine is measured again.

    >>> machine("h100-sxm").theoretical.bandwidth
    3350000000000.0
    """
    if name is not None:
        return catalogue.find(name)
    return this_machine(calibrate=calibrate, progress=progress, finish=measure_efficiency)
