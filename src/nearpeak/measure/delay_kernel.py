"""Kernels with a known answer, in triton: a spin of exactly so many nanoseconds, and multiply-adds in registers.

triton comes with GPU builds of torch; without it these are None and what needs them says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from nearpeak.devices.backends import require_gpu_backend

_FMA_STEPS = 4096
_FMA_CHAINS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFlopsKernel:
    """A launch and the floating-point operations that it does."""

    launch: Callable[[], Any]
    flops: float


def triton_missing() -> str | None:
    """Why there is no triton here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; GPU builds of torch for Linux bring it"
    return None


def delay_kernel(device: torch.device) -> Callable[[int], None] | None:
    """A launcher that occupies one multiprocessor for a number of nanoseconds of the GPU's own global timer."""
    if triton_missing():
        return None
    times = torch.zeros(2, dtype=torch.int64, device=device)
    kernel = _kernels()["spin"]

    def launch(nanoseconds: int) -> None:
        kernel[(1,)](times, nanoseconds, num_warps=1)

    return launch


def fma_kernel(device: torch.device) -> KnownFlopsKernel | None:
    """Independent chains of float32 multiply-adds in every lane."""
    if triton_missing():
        return None
    processors = require_gpu_backend().properties(device.index or 0).processors or 1
    programs, width = processors * 16, 1024
    out = torch.empty(programs * width, device=device)
    kernel = _kernels()["fma"]
    return KnownFlopsKernel(
        launch=lambda: kernel[(programs,)](out, 0.999, _FMA_STEPS, WIDTH=width, num_warps=8),
        flops=2.0 * programs * width * _FMA_STEPS * _FMA_CHAINS,
    )


@lru_cache(maxsize=1)
def _kernels() -> dict[str, Any]:
    from nearpeak.measure import delay_kernel_triton

    return {"spin": delay_kernel_triton.delay, "fma": delay_kernel_triton.fma}
