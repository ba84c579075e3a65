"""Which backend a torch device belongs to: the table of vendors."""

from __future__ import annotations

import torch

from nearpeak.devices.amd import Amd
from nearpeak.devices.cpu import Cpu
from nearpeak.devices.device import Backend, GpuBackend
from nearpeak.devices.nvidia import Nvidia
from nearpeak.errors import EnvironmentProblem

CPU = Cpu()
GPU_BACKENDS: tuple[GpuBackend, ...] = (Nvidia(), Amd())
"""In the order in which they are looked for. A new vendor is one entry."""


def gpu_backend() -> GpuBackend | None:
    """The backend of the GPUs that torch can use here; None where there are none."""
    return next((backend for backend in GPU_BACKENDS if backend.is_available()), None)


def gpu_in_use() -> GpuBackend | None:
    """The backend of the GPUs, where this process has used one."""
    backend = gpu_backend()
    return backend if backend is not None and backend.is_initialized() else None


def gpu_visible() -> bool:
    """Whether torch can use a GPU, asked without starting the GPU's runtime in this process."""
    return any(backend.is_visible() for backend in GPU_BACKENDS)


def find_backend(device: torch.device) -> Backend | None:
    """The backend of a torch device; None for a kind of device that nearpeak does not know."""
    if device.type == CPU.torch_type:
        return CPU
    backend = gpu_backend()
    return backend if backend is not None and backend.torch_type == device.type else None


def backend_of(device: torch.device) -> Backend:
    """The backend of a torch device; EnvironmentProblem for a kind of device that nearpeak does not know."""
    backend = find_backend(device)
    if backend is None:
        known = " and ".join(sorted({repr(backend.torch_type) for backend in (CPU, *GPU_BACKENDS)}))
        raise EnvironmentProblem(
            f"nearpeak cannot measure the device {str(device)!r}: it knows {known}. Move the tensors to one of these. "
            "What another kind of device takes is in docs/extending/device.md."
        )
    return backend


def is_gpu(device: torch.device) -> bool:
    """Whether a torch device is a GPU that nearpeak can measure, be it here or not."""
    return any(device.type == backend.torch_type for backend in GPU_BACKENDS)


def require_gpu_backend() -> GpuBackend:
    """The backend of the GPUs; EnvironmentProblem where there are none."""
    backend = gpu_backend()
    if backend is None:
        raise EnvironmentProblem(f"This needs a GPU, and torch {torch.__version__} can use none here.")
    return backend


def profiler_activities() -> list[torch.profiler.ProfilerActivity]:
    """What torch's profiler records here: the CPU, and the GPU where there is one."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    backend = gpu_backend()
    if backend is not None:
        activities.append(getattr(torch.profiler.ProfilerActivity, backend.profiler_activity))
    return activities
