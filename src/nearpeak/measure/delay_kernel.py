"""Triton kernels with a known answer: a delay of so many nanoseconds, and a counted number of multiply-adds.

Imported only where triton is installed; GPU builds of torch for Linux bring it.
"""

# mypy: ignore-errors
# Triton's language is not Python to a type checker.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nearpeak.devices.backends import require_gpu_backend

_FMA_STEPS = 4096
_FMA_CHAINS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFlopsKernel:
    """A launch and the floating-point operations that it does."""

    launch: Callable[[], Any]
    flops: float


def delay_kernel(device: torch.device) -> Callable[[int], None]:
    """A launcher that occupies one multiprocessor for a number of nanoseconds of the GPU's own global timer."""
    times = torch.zeros(2, dtype=torch.int64, device=device)

    def launch(nanoseconds: int) -> None:
        delay[(1,)](times, nanoseconds, num_warps=1)

    return launch


def fma_kernel(device: torch.device) -> KnownFlopsKernel:
    """Independent chains of float32 multiply-adds in every lane."""
    processors = require_gpu_backend().properties(device.index or 0).processors
    programs, width = processors * 16, 1024
    out = torch.empty(programs * width, device=device)
    return KnownFlopsKernel(
        launch=lambda: fma[(programs,)](out, 0.999, _FMA_STEPS, WIDTH=width, num_warps=8),
        flops=2.0 * programs * width * _FMA_STEPS * _FMA_CHAINS,
    )


@triton.jit
def delay(times_ptr, nanoseconds):
    """Reads the global timer until `nanoseconds` have passed; stores begin and end."""
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(times_ptr, begin)
    tl.store(times_ptr + 1, now)


@triton.jit
def fma(out_ptr, factor, steps, WIDTH: tl.constexpr):  # noqa: N803  # upper case: a compile-time constant
    """Four independent chains per lane, so that the latency of one hides behind the others."""
    offsets = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    start = offsets.to(tl.float32)
    a, b, c, d = start, start + 1.0, start + 2.0, start + 3.0
    for _ in range(steps):
        a = a * factor + 1.0
        b = b * factor + 1.0
        c = c * factor + 1.0
        d = d * factor + 1.0
    tl.store(out_ptr + offsets, a + b + c + d)
