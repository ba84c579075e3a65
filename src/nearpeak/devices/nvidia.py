"""NVIDIA GPUs under a CUDA build of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from nearpeak.devices.cuda_graph import CapturedNodes, nodes_of_capture
from nearpeak.devices.device import ConditionsReader, DeviceProperties, GpuBackend
from nearpeak.devices.nvml import NvmlConditions


class Nvidia(GpuBackend):
    """The GPUs that a CUDA build of torch drives."""

    vendor: ClassVar[str] = "nvidia"
    torch_type: ClassVar[str] = "cuda"
    profiler_activity: ClassVar[str] = "CUDA"
    launch_prefixes: ClassVar[tuple[str, ...]] = ("cuda", "cu")

    def is_available(self) -> bool:
        """Whether torch is a CUDA build and has a device."""
        return torch.version.hip is None and torch.cuda.is_available()

    def is_visible(self) -> bool:
        """torch asks NVML instead of the CUDA runtime."""
        variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
        before = os.environ.get(variable)
        os.environ[variable] = "1"
        try:
            return self.is_available()
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before

    def is_initialized(self) -> bool:
        """Whether this process has a CUDA context."""
        return bool(torch.cuda.is_initialized())

    def count(self) -> int:
        """The devices that CUDA_VISIBLE_DEVICES leaves."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """torch's current device."""
        return torch.cuda.current_device()

    def properties(self, index: int) -> DeviceProperties:
        """From the driver, through torch."""
        properties: Any = torch.cuda.get_device_properties(index)
        return DeviceProperties(
            name=properties.name,
            architecture=self.architecture(properties),
            processors=properties.multi_processor_count,
            memory_bytes=float(properties.total_memory),
            cache_bytes=float(getattr(properties, "L2_cache_size", 0)) or None,
            uuid=str(getattr(properties, "uuid", "")),
        )

    def architecture(self, properties: Any) -> str:
        """Of torch's properties of a device."""
        return f"compute capability {properties.major}.{properties.minor}"

    def conditions(self, index: int) -> ConditionsReader:
        """Through NVML."""
        return NvmlConditions(self.properties(index).uuid)

    def device(self, index: int) -> torch.device:
        """The device "cuda:INDEX"."""
        return torch.device(self.torch_type, index)

    def selected(self, index: int) -> AbstractContextManager[Any]:
        """A context of torch."""
        return torch.cuda.device(index)

    def synchronize(self, index: int | None = None) -> None:
        """Waits for all streams."""
        torch.cuda.synchronize(index)

    def event(self, *, external: bool = False) -> Any:
        """torch 2.8 and later can record external events."""
        return torch.cuda.Event(enable_timing=True, **({"external": True} if external else {}))

    def capture(self, calls: Callable[[], Any]) -> Any:
        """A CUDA graph. Other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        return graph

    def is_capturing(self) -> bool:
        """Asks the driver, which allows this during a capture."""
        return torch.cuda.is_current_stream_capturing()

    def captured_nodes(self) -> CapturedNodes | None:
        """Asks the driver, which allows this too."""
        return nodes_of_capture()

    def delay(self, cycles: int) -> None:
        """A kernel that torch has for its own tests."""
        torch.cuda._sleep(cycles)

    def new_stream(self) -> Any:
        """A stream of torch."""
        return torch.cuda.Stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context of torch."""
        return torch.cuda.stream(stream)

    def memory_capacity(self, index: int) -> float | None:
        """All of the device's memory."""
        return self.properties(index).memory_bytes

    def available_bytes(self, index: int) -> float | None:
        """What the driver reports as free."""
        return float(torch.cuda.mem_get_info(index)[0])

    def allocated_bytes(self, index: int) -> float:
        """What torch's allocator has handed out."""
        return float(torch.cuda.memory_allocated(index))

    def allocator_bytes(self, index: int, moment: str) -> tuple[float, float] | None:
        """An allocator that the user plugged in keeps no statistics."""
        statistics = torch.cuda.memory_stats_as_nested_dict(index)
        try:
            allocated, reserved = (statistics[name]["all"][moment] for name in ("allocated_bytes", "reserved_bytes"))
            return float(allocated), float(reserved)
        except KeyError:
            return None

    def driver_allocations(self, index: int) -> int:
        """Allocations and retries."""
        statistics: dict[str, Any] = torch.cuda.memory_stats(index)
        return int(statistics.get("num_device_alloc", 0) + statistics.get("num_alloc_retries", 0))

    def peak_allocated_bytes(self, index: int | None = None) -> float:
        """Since the process started, or the peak was reset."""
        return float(torch.cuda.max_memory_allocated(index))

    def release_cached_memory(self) -> None:
        """Returns unused blocks of the caching allocator."""
        torch.cuda.empty_cache()
