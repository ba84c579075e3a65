"""NVML, the management library of NVIDIA's driver (the package nvidia-ml-py): GPUs and their conditions. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from nearpeak.devices.device import Conditions, ConditionsReader, GpuFacts, GpuScan

_THROTTLE_REASONS = {
    # nvmlClocksEventReasons of NVML's header; reasons that are choices (idle, application clocks) are left out.
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


class NvmlConditions(ConditionsReader):
    """Reads one GPU through NVML; every field is None where NVML is absent or forbidden."""

    def __init__(self, uuid: str) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self.missing = "nvidia-ml-py is not installed"
            return
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
            clock_hz=_scaled(clock, 1e6),
            memory_clock_hz=_scaled(memory_clock, 1e6),
            power_watts=None if power is None else power / 1e3,
            temperature_celsius=None if temperature is None else float(temperature),
            throttle=tuple(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit),
        )

    def highest_clock_hz(self) -> float | None:
        """The highest clock of the multiprocessors."""
        if self._handle is None:
            return None
        return _scaled(self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM), 1e6)

    def processes(self) -> int | None:
        """The number of processes with a compute context."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else len(processes)

    def driver(self) -> str | None:
        """The version of the driver."""
        if self._handle is None:
            return None
        try:
            return _text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:  # one counter that this board or container does not offer
            return None


def scan_gpus() -> GpuScan:
    """The GPUs that NVML, the driver's management library, reports."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return GpuScan(gpus=(), problem="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuScan(gpus=(), problem=f"NVML cannot be used: {error}")
    try:
        gpus = tuple(_gpu_facts(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        return GpuScan(gpus=gpus, problem=None if gpus else "NVML reports no GPU")
    except nvml.NVMLError as error:
        return GpuScan(gpus=(), problem=f"NVML does not tell about the GPUs: {error}")
    finally:
        nvml.nvmlShutdown()


def _gpu_facts(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError:  # some drivers and virtual GPUs do not answer every question
            return None

    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    return GpuFacts(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)) or "",
        uuid=_text(ask(nvml.nvmlDeviceGetUUID, handle)),
        driver_version=_text(ask(nvml.nvmlSystemGetDriverVersion)),
        memory_bytes=None if memory is None else float(memory.total),
        power_limit_watts=_scaled(ask(nvml.nvmlDeviceGetPowerManagementLimit, handle), 1e-3),
        clock_multiprocessor_hz=_scaled(ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM), 1e6),
        clock_memory_hz=_scaled(ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM), 1e6),
    )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _text(value: str | bytes | None) -> str | None:
    """Older releases of pynvml give bytes."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
