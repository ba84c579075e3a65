"""Where a self-test runs: the GPU if there is one, else the CPU, with a spin of known duration on either."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nearpeak.measure.case import Case
from nearpeak.measure.cuda import CudaDevice, cuda_device
from nearpeak.measure.spin import spin_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device under test."""

    cuda: CudaDevice | None
    spin: Callable[[int], None] | None
    """Occupies the device for so many nanoseconds; None where there is no way to do that exactly."""

    @property
    def name(self) -> str:
        """For reports."""
        return self.cuda.name if self.cuda is not None else "cpu"

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self.cuda.device if self.cuda is not None else torch.device("cpu")

    def spin_case(self, nanoseconds: Callable[[], int] | int, name: str = "spin") -> Case:
        """A case that spins; a callable decides anew at every call, which is how drifts are injected."""
        assert self.spin is not None
        spin = self.spin
        anchor = torch.zeros(1, device=self.device)  # tells the harness where the work is

        def call(anchor: torch.Tensor) -> None:
            spin(nanoseconds() if callable(nanoseconds) else nanoseconds)

        return Case(call, anchor, name=name)


def place() -> Place:
    """The GPU of this process, or its CPU."""
    if not torch.cuda.is_available():
        return Place(cuda=None, spin=spin_host)
    device = cuda_device(torch.cuda.current_device())
    return Place(cuda=device, spin=spin_kernel(device.device))


def spin_host(nanoseconds: int) -> None:
    """Reads the host's clock until the time has passed."""
    end = time.perf_counter_ns() + nanoseconds
    while time.perf_counter_ns() < end:
        pass
