"""`Target`: what torch's choice of operators depends on, of the machine that a trace is for."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import torch

from nearpeak.machines.machine import Machine

_CAPABILITIES = {"volta": (7, 0), "turing": (7, 5), "ada": (8, 9), "hopper": (9, 0)}
_CAPABILITIES_BY_MEMORY = {"ampere": ((8, 0), (8, 6)), "blackwell": ((10, 0), (12, 0))}
"""Data center parts have HBM and the first capability; the others the second."""

_BUNDLED_CUDNN = (((2, 12), 92000), ((2, 11), 91900), ((2, 7), 91002), ((2, 0), 90100))
"""The cuDNN in the wheel of each torch release for Linux on PyPI, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The kind of machine, and for a GPU what decides between operators."""

    kind: Literal["cpu", "gpu"]
    vendor: str = "nvidia"
    capability: tuple[int, int] = (9, 0)
    """Of CUDA: (9, 0) is Hopper."""
    cudnn: int = 0
    """The version of cuDNN as `torch.backends.cudnn.version()` gives it; 0 where there is none."""
    torch: tuple[int, int] = (2, 6)

    @property
    def nvidia(self) -> bool:
        """Whether it is a GPU that CUDA drives."""
        return self.kind == "gpu" and self.vendor == "nvidia"


def target_of(machine: Machine) -> Target:
    """The target that a machine is, under the installed release of torch.

    >>> from nearpeak.machines.catalogue import find
    >>> target_of(find("h200-sxm")).capability, target_of(find("a10")).capability
    ((9, 0), (8, 6))
    """
    if machine.kind == "cpu":
        return Target(kind="cpu", torch=torch_release())
    vendor = machine.vendor.lower()
    return Target(
        kind="gpu",
        vendor=vendor,
        capability=_capability(machine),
        cudnn=cudnn_version() if vendor == "nvidia" else 0,
        torch=torch_release(),
    )


@functools.cache
def torch_release() -> tuple[int, int]:
    """The major and minor number of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version() -> int:
    """The cuDNN of this torch; in a build without CUDA, the one that the same release for CUDA brings along."""
    installed = torch.backends.cudnn.version()
    if installed is not None and not torch.version.hip:
        return int(installed)
    return next(version for release, version in _BUNDLED_CUDNN if torch_release() >= release)


def _capability(machine: Machine) -> tuple[int, int]:
    said = re.fullmatch(r"compute capability (\d+)\.(\d+)", machine.architecture)
    if said:
        return int(said[1]), int(said[2])
    if machine.architecture in _CAPABILITIES_BY_MEMORY:
        data_center, other = _CAPABILITIES_BY_MEMORY[machine.architecture]
        return data_center if (machine.memory_kind or "").upper().startswith("HBM") else other
    return _CAPABILITIES.get(machine.architecture, (9, 0))
