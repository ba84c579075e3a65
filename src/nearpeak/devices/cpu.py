"""The CPU as a device: its memory as Linux reports it, its clock, and the throttling by cgroups."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

from nearpeak.devices.device import Backend, Conditions, ConditionsReader, DeviceProperties
from nearpeak.machines.cgroups import memory_limit, parse_number
from nearpeak.machines.detect import detect_cpu


class Cpu(Backend):
    """The processors of this host that this process may use: one device."""

    vendor: ClassVar[str] = "cpu"
    torch_type: ClassVar[str] = "cpu"

    def is_available(self) -> bool:
        """Always."""
        return True

    def count(self) -> int:
        """All processors together are one device."""
        return 1

    def current(self) -> int:
        """The only one."""
        return 0

    def properties(self, index: int) -> DeviceProperties:
        """What `detect_cpu` reads from the system."""
        machine = detect_cpu()
        return DeviceProperties(
            name=machine.name,
            architecture=machine.architecture,
            processors=machine.processors,
            memory_bytes=machine.memory_bytes,
            cache_bytes=machine.cache_bytes,
        )

    def conditions(self, index: int) -> ConditionsReader:
        """From /sys and /proc."""
        return CpuConditions()

    def synchronize(self, index: int | None = None) -> None:
        """A call on the CPU has ended when it returns."""

    def memory_capacity(self, index: int) -> float | None:
        """The host's memory, or what the cgroup of this process may use of it."""
        if not hasattr(os, "sysconf"):  # Windows
            return None
        installed = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return min(installed, memory_limit() or installed)

    def available_bytes(self, index: int) -> float | None:
        """The kernel's estimate of what new processes can get."""
        if sys.platform != "linux":
            return None
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
        return None

    def allocated_bytes(self, index: int) -> float:
        """The resident set of this process; 0 where the system is not Linux."""
        if sys.platform != "linux":
            return 0.0
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class CpuConditions(ConditionsReader):
    """Reads the clock of the first core, the throttling of the cgroup and the pressure on the CPUs."""

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
