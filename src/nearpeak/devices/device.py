"""The interface to a vendor's devices, and the records that it returns. No torch at import.

`Backend` covers what every device has; `GpuBackend` adds what only an accelerator has: events, graphs, delays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from nearpeak.devices.cuda_graph import CapturedNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The state of a device at one moment; None where it cannot be read."""

    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttle: tuple[str, ...] = ()
    """Reasons that the driver or the system gives for running slower: keys of `measure.quality.THROTTLE_FLAGS`."""


class ConditionsReader(ABC):
    """Reads the conditions of one device. What cannot be read is None, never zero."""

    missing: str | None = None
    """Why nothing can be read."""

    @abstractmethod
    def read(self) -> Conditions:
        """The conditions now. Counters that only grow are read as the difference since the last call."""

    def highest_clock_hz(self) -> float | None:
        """The highest clock of the processors."""
        return None

    def processes(self) -> int | None:
        """The number of processes that compute on the device."""
        return None

    def driver(self) -> str | None:
        """The version of the driver."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """One device as torch describes it."""

    name: str
    """As the driver reports it: the catalogue finds a machine by this name."""
    architecture: str
    """"compute capability 9.0", "gfx942", "x86_64"."""
    processors: int | None
    """Streaming multiprocessors, compute units or cores."""
    memory_bytes: float | None
    cache_bytes: float | None
    """The last-level cache; None where the driver does not report it."""
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as its driver describes it, without torch; `index` is the driver's own, before CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    uuid: str | None
    driver_version: str | None
    memory_bytes: float | None
    power_limit_watts: float | None
    clock_multiprocessor_hz: float | None
    """The highest clock that the driver allows."""
    clock_memory_hz: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuScan:
    """The GPUs that a driver reports, or why it reports none."""

    gpus: tuple[GpuFacts, ...]
    problem: str | None


class Backend(ABC):
    """The devices of one vendor. `index` is torch's."""

    vendor: ClassVar[str]
    """As in the catalogue: "nvidia", "amd"."""
    torch_type: ClassVar[str]
    """`torch.device.type`."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether torch can use a device of this vendor."""

    @abstractmethod
    def count(self) -> int:
        """The number of devices."""

    @abstractmethod
    def current(self) -> int:
        """The index of the current device."""

    @abstractmethod
    def properties(self, index: int) -> DeviceProperties:
        """Name, architecture, processors, memory and cache."""

    @abstractmethod
    def conditions(self, index: int) -> ConditionsReader:
        """A reader of clocks, power, temperature and throttling."""

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None:
        """Waits until the device has no work left."""

    @abstractmethod
    def memory_capacity(self, index: int) -> float | None:
        """Bytes of memory that this process may use."""

    @abstractmethod
    def available_bytes(self, index: int) -> float | None:
        """Bytes of memory that are free now."""

    @abstractmethod
    def allocated_bytes(self, index: int) -> float:
        """Bytes of memory that this process uses now."""

    def allocator_bytes(self, index: int, moment: str) -> tuple[float, float] | None:
        """Bytes that torch's allocator handed out and reserved: at the "current" moment, or at the "peak".

        None where the allocator keeps no statistics.
        """
        return None


class GpuBackend(Backend):
    """The GPUs of one vendor."""

    profiler_activity: ClassVar[str]
    """The name in `torch.profiler.ProfilerActivity` that records kernels."""
    launch_prefixes: ClassVar[tuple[str, ...]]
    """What the names of the runtime's launch calls begin with in the profiler's events."""

    def is_visible(self) -> bool:
        """`is_available`, without starting the runtime in this process where that can be done."""
        return self.is_available()

    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether this process has used a device."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """The torch device with this index."""

    @abstractmethod
    def selected(self, index: int) -> AbstractContextManager[Any]:
        """Inside, the device with this index is the current one."""

    @abstractmethod
    def event(self, *, external: bool = False) -> Any:
        """An event with `record`, `query`, `synchronize` and `elapsed_time` (in ms).

        With `external` it can be recorded inside a graph; TypeError where this torch cannot do that.
        """

    @abstractmethod
    def capture(self, calls: Callable[[], Any]) -> Any:
        """The kernels that `calls` launches as a graph with a method `replay`; RuntimeError if they cannot be."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    def captured_nodes(self) -> CapturedNodes | None:
        """The nodes of the graph that the current stream is being captured into; None if the driver does not tell."""
        return None

    @abstractmethod
    def delay(self, cycles: int) -> None:
        """Launches a kernel of one thread that counts so many clock cycles."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream beside the current one."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, kernels go to this stream."""

    @abstractmethod
    def driver_allocations(self, index: int) -> int:
        """How often torch's allocator asked the driver for memory, retries included."""

    @abstractmethod
    def peak_allocated_bytes(self, index: int | None = None) -> float:
        """The most bytes that torch's allocator had handed out."""

    @abstractmethod
    def release_cached_memory(self) -> None:
        """Returns to the driver what torch's allocator holds and nobody uses."""
