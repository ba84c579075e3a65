"""AMD GPUs under a ROCm build of torch, which has them under the names of torch.cuda.

Not run on an AMD GPU yet. Clocks, power and throttling are not read: that takes AMD SMI. The kernels of nearpeak are
for NVIDIA GPUs; elsewhere plain torch runs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nearpeak.devices.cuda_graph import CapturedNodes
from nearpeak.devices.device import Conditions, ConditionsReader
from nearpeak.devices.nvidia import Nvidia


class Amd(Nvidia):
    """The GPUs that a ROCm build of torch drives."""

    vendor: ClassVar[str] = "amd"
    launch_prefixes: ClassVar[tuple[str, ...]] = ("hip",)

    def is_available(self) -> bool:
        """Whether torch is a ROCm build and has a device."""
        return torch.version.hip is not None and torch.cuda.is_available()

    def architecture(self, properties: Any) -> str:
        """The target of the compiler, without its features: "gfx942"."""
        return str(properties.gcnArchName).partition(":")[0]

    def captured_nodes(self) -> CapturedNodes | None:
        """Not asked of HIP."""
        return None

    def conditions(self, index: int) -> ConditionsReader:
        """A reader that knows nothing."""
        return _UnknownConditions()


class _UnknownConditions(ConditionsReader):
    missing = "AMD SMI is not asked"

    def read(self) -> Conditions:
        return Conditions()
