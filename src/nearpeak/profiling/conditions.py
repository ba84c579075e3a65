"""`ConditionsWatch`: what the host and the GPU do while steps are timed and profiled.

The host's counters are read before and after. The GPU's clock is read by a thread of its own, through the driver's
management library: a call to the device itself would be part of the step. The thread is none of Python's `threading`,
so that the program does not see it, and it sleeps nearly all of the time.
"""

from __future__ import annotations

import _thread
from collections import Counter
from contextlib import suppress

from nearpeak.devices.backends import gpu_in_use
from nearpeak.devices.device import Conditions, ConditionsReader
from nearpeak.devices.host_load import HostLoad, HostReading
from nearpeak.measure.statistics import median
from nearpeak.profiles.conditions import StepConditions, worst_conditions

INTERVAL_S = 0.1
"""Between two readings of the GPU. Each takes the interpreter from the program for some tens of microseconds."""
FIRST_S = 0.02
HELD_SHARE = 0.25
"""A reason for a lower clock counts where it held in this share of the readings."""


class ConditionsWatch:
    """Windows of time in which steps ran, one after the other, and the conditions in all of them."""

    def __init__(self) -> None:
        self._host = HostLoad()
        self._begun: HostReading | None = None
        self._windows: list[StepConditions] = []
        self._reader: ConditionsReader | None = None
        self._gpu: _GpuReadings | None = None

    def prepare(self) -> None:
        """Opens the driver's library, which takes a while, before a window begins."""
        backend = gpu_in_use()
        if self._reader is None and backend is not None:
            self._reader = backend.conditions(backend.current())

    def begin(self, *, with_gpu: bool = False) -> None:
        """A window begins; `with_gpu` it has the clock of the GPU too. An open one is forgotten."""
        self.cancel()
        self._begun = self._host.read()
        if with_gpu and self._reader is not None and self._reader.missing is None:
            self._gpu = _GpuReadings(self._reader)

    def cancel(self) -> None:
        """Forgets the window that is open."""
        self._begun = None
        if self._gpu is not None:
            self._gpu.stop()
            self._gpu = None

    def end(self) -> None:
        """The window ends."""
        begun, gpu = self._begun, self._gpu
        self.cancel()
        if begun is None:
            return
        shares = self._host.shares(begun, self._host.read())
        readings = gpu.readings if gpu is not None else []
        clocks = [reading.clock_hz for reading in readings if reading.clock_hz]
        powers = [reading.power_watts for reading in readings if reading.power_watts is not None]
        reasons = Counter(reason for reading in readings for reason in reading.throttle)
        self._windows.append(
            StepConditions(
                waited_share=shares.waited,
                others_share=shares.others,
                throttled_share=shares.throttled,
                clock_hz=median(clocks) if clocks else None,
                power_watts=median(powers) if powers else None,
                throttle=tuple(reason for reason, count in reasons.items() if count >= HELD_SHARE * len(readings)),
                gpu_processes=self._reader.processes() if gpu is not None and self._reader is not None else None,
            )
        )

    def forget(self) -> None:
        """Forgets all windows: their steps do not count."""
        self.cancel()
        self._windows.clear()

    @property
    def conditions(self) -> StepConditions | None:
        """Those of all windows that ended; None without any."""
        return worst_conditions(self._windows)


class _GpuReadings:
    """Reads the conditions of a GPU now and then, on a thread, until it is stopped."""

    def __init__(self, reader: ConditionsReader) -> None:
        self.readings: list[Conditions] = []
        self._reader = reader
        self._running = _thread.allocate_lock()
        self._running.acquire()
        with suppress(RuntimeError):  # no thread can be started any more
            _thread.start_new_thread(self._read, ())

    def stop(self) -> None:
        """No further reading begins."""
        if self._running.locked():
            self._running.release()

    def _read(self) -> None:
        wait_s = FIRST_S
        with suppress(Exception):  # nobody could be told
            while not self._running.acquire(timeout=wait_s):
                self.readings.append(self._reader.read())
                wait_s = INTERVAL_S
