"""`Target`: the machine that a trace is for, as far as torch's choice of operators depends on it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import torch

from nearpeak.errors import UnknownMachine, did_you_mean
from nearpeak.machines.machine import Machine

_CAPABILITIES = {"volta": (7, 0), "turing": (7, 5), "ada": (8, 9), "hopper": (9, 0)}
_CAPABILITIES_BY_MEMORY = {"ampere": ((8, 0), (8, 6)), "blackwell": ((10, 0), (12, 0))}
"""Data center parts have HBM and the first capability; the others the second."""
_AMD_ARCHITECTURES = re.compile(r"cdna\d?|gfx9\w+")

_BUNDLED_CUDNN = (((2, 12), 92000), ((2, 11), 91900), ((2, 7), 91002), ((2, 0), 90100))
"""The cuDNN in the wheel of each torch release for Linux on PyPI, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The kind of machine, and for a GPU what decides between operators."""

    kind: Literal["cpu", "gpu"]
    vendor: str = "nvidia"
    capability: tuple[int, int] | None = None
    """The compute capability of an NVIDIA GPU: (9, 0) is Hopper. None for every other machine."""
    cudnn: int = 0
    """The version of cuDNN as `torch.backends.cudnn.version()` gives it; 0 where there is none."""
    torch: tuple[int, int] = (2, 6)

    def __post_init__(self) -> None:
        if self.nvidia != (self.capability is not None):
            raise ValueError(f"{self}: an NVIDIA GPU has a compute capability, and no other machine has one")

    @property
    def nvidia(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.kind == "gpu" and self.vendor == "nvidia"

    @property
    def hopper(self) -> bool:
        """Whether it is an NVIDIA GPU of the Hopper generation."""
        return self.capability == (9, 0)

    def runs_kernels_since(self, capability: tuple[int, int]) -> bool:
        """Whether torch runs its kernels for GPUs since this compute capability; AMD's CDNA runs those for Ampere."""
        return self.kind == "gpu" and (self.capability or (8, 0)) >= capability


def target_of(machine: Machine) -> Target:
    """The target that a machine is, under the installed release of torch.

    >>> from nearpeak.machines.catalogue import find
    >>> target_of(find("h200-sxm")).capability, target_of(find("a10")).capability, target_of(find("mi300x")).capability
    ((9, 0), (8, 6), None)
    """
    if machine.kind == "cpu":
        return Target(kind="cpu", torch=torch_release())
    vendor = machine.vendor.lower()
    if vendor == "nvidia":
        return Target(kind="gpu", capability=_capability(machine), cudnn=cudnn_version(), torch=torch_release())
    if vendor == "amd" and _AMD_ARCHITECTURES.fullmatch(machine.architecture):
        return Target(kind="gpu", vendor="amd", torch=torch_release())
    raise UnknownMachine(
        f"{machine.name}: which operators torch runs on {machine.vendor}'s architecture {machine.architecture!r} is "
        "not known. Known are NVIDIA GPUs since Volta and AMD's CDNA GPUs. Name a machine of the catalogue with on=, "
        "or give your own machine the vendor and the architecture whose operators it runs, such as nvidia and hopper."
    )


@functools.cache
def torch_release() -> tuple[int, int]:
    """The major and minor number of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version() -> int:
    """The cuDNN of this torch; in a build without CUDA, the one that the same release for CUDA bundles."""
    installed = torch.backends.cudnn.version()
    if installed is not None and not torch.version.hip:
        return int(installed)
    return next(version for release, version in _BUNDLED_CUDNN if torch_release() >= release)


def _capability(machine: Machine) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU, as torch reported it or by the name of its architecture."""
    reported = re.fullmatch(r"compute capability (\d+)\.(\d+)", machine.architecture)
    if reported:
        return int(reported[1]), int(reported[2])
    if machine.architecture in _CAPABILITIES_BY_MEMORY:
        data_center, consumer = _CAPABILITIES_BY_MEMORY[machine.architecture]
        return data_center if (machine.memory_kind or "").upper().startswith("HBM") else consumer
    if machine.architecture not in _CAPABILITIES:
        architectures = (*_CAPABILITIES, *_CAPABILITIES_BY_MEMORY)
        raise UnknownMachine(
            f"{machine.name} has the architecture {machine.architecture!r}, of which no compute capability is known. "
            f"{did_you_mean(machine.architecture, architectures)} Or write it as 'compute capability 9.0'."
        )
    return _CAPABILITIES[machine.architecture]
