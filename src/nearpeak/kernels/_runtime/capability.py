"""Which GPU this is: its vendor, its compute capability, and whether it is one of NVIDIA's Hopper generation."""

from __future__ import annotations

import functools
import re

import torch

_VENDOR = "nvidia" if torch.version.hip is None else "amd"
_HOPPER = (9, 0)
_HOPPER_NAME = re.compile(r"\bG?H(100|200|800|20)")
"""H100, H200 and GH200, and the H800 and H20 of other markets, with letters of their variants."""


def gpu_vendor() -> str:
    """The vendor of the GPUs that this build of torch runs on."""
    return _VENDOR


@functools.cache
def cuda_capability(index: int) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for other vendors, whose numbers mean something else."""
    if _VENDOR != "nvidia" or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None  # the last: a fake tensor of a GPU that is not there
    return torch.cuda.get_device_capability(index)


@functools.cache
def is_hopper(index: int) -> bool:
    """Whether a GPU is one of NVIDIA's Hopper generation, by its name too: AMD's MI200 reports capability (9, 0)."""
    return cuda_capability(index) == _HOPPER and _HOPPER_NAME.search(torch.cuda.get_device_name(index)) is not None
