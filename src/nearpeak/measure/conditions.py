"""The state of the machine between blocks: clocks, power, heat, throttling, contention.

Counters that only grow are read as differences since the reading before. What cannot be read is None, never zero.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Protocol

from nearpeak.machines.cgroups import parse_number
from nearpeak.measure.timing import Conditions


class ConditionsReader(Protocol):
    """Reads the present state."""

    def read(self) -> Conditions:
        """The state now, and what happened since the last call."""
        ...


_REASONS = {
    # nvmlClocksEventReasons of NVML's header; reasons that are choices (idle, application clocks) are left out.
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


class GpuConditions:
    """Reads one GPU through NVML; every field is None where NVML is absent or forbidden."""

    def __init__(self, uuid: str) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self.missing: str | None = "nvidia-ml-py is not installed"
            return
        self.missing = None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            self.missing = f"NVML: {error}"

    def read(self) -> Conditions:
        """Clocks, power, temperature and throttle reasons at this moment."""
        if self._handle is None:
            return Conditions()
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        clock = self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        memory_clock = self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)
        power = self._ask("nvmlDeviceGetPowerUsage")
        temperature = self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        return Conditions(
            clock_hz=None if clock is None else clock * 1e6,
            memory_clock_hz=None if memory_clock is None else memory_clock * 1e6,
            power_watts=None if power is None else power / 1e3,
            temperature_celsius=None if temperature is None else float(temperature),
            throttle=tuple(text for bit, text in _REASONS.items() if reasons & bit),
        )

    def highest_clock_hz(self) -> float | None:
        """The highest clock of the multiprocessors."""
        clock = self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM) if self._handle is not None else None
        return None if clock is None else clock * 1e6

    def processes(self) -> int | None:
        """How many processes compute on this GPU."""
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else len(found)

    def driver(self) -> str | None:
        """The driver's version."""
        if self._handle is None:
            return None
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:  # one counter that this board or container does not offer
            return None


class CpuConditions:
    """Reads the clock of the first core, the container's throttling and the pressure on the CPUs."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._last: tuple[float, float | None, float | None] | None = None
        self.read()

    def read(self) -> Conditions:
        """The clock now; throttled and stalled time since the last reading, as reasons."""
        now = time.perf_counter()
        throttled, waiting = self._counter("sys/fs/cgroup/cpu.stat", "throttled_usec"), self._pressure()
        reasons = []
        if self._last is not None and now > self._last[0]:
            elapsed = now - self._last[0]
            if _grew(self._last[1], throttled, 0.01 * elapsed * 1e6):
                reasons.append("cpu quota")
            if _grew(self._last[2], waiting, 0.1 * elapsed * 1e6):
                reasons.append("cpu contended")
        self._last = (now, throttled, waiting)
        kilohertz = self._text("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
        return Conditions(clock_hz=float(kilohertz) * 1e3 if kilohertz else None, throttle=tuple(reasons))

    def _text(self, path: str) -> str | None:
        with contextlib.suppress(OSError):
            return (self._root / path).read_text().strip()
        return None

    def _counter(self, path: str, key: str) -> float | None:
        for line in (self._text(path) or "").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return parse_number(value)
        return None

    def _pressure(self) -> float | None:
        """Microseconds in which some runnable task had no core."""
        for line in (self._text("proc/pressure/cpu") or "").splitlines():
            if line.startswith("some") and "total=" in line:
                return parse_number(line.rpartition("total=")[2])
        return None


def _grew(before: float | None, now: float | None, by: float) -> bool:
    return before is not None and now is not None and now - before > by
