"""`Here`: where an example runs: this machine, measured, or one of the catalogue, for which it only predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.gallery.parts import Row
from nearpeak.machines.model import Machine
from nearpeak.plan import Cluster

T = TypeVar("T")
GPU_BAND = (0.8, 1.25)
"""Measured / predicted on a GPU that nobody else uses."""
CPU_BAND = (0.5, 2.0)
"""The same on a CPU, which others use too."""
ELSEWHERE = "h100-sxm"
"""Whose clusters are planned where there is no GPU."""
FLOOR = (0.9, None)
"""The same where what is predicted is the least that a call can take."""
SECONDS = 0.4
"""For each measurement, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A machine, and what an example may do there."""

    machine: Machine
    device: str
    """"cuda" or "cpu": whose tensors are made, also where nothing runs."""
    measures: bool = True
    progress: Callable[[str], None] = field(default=lambda line: None)

    @property
    def gpu(self) -> bool:
        """Whether the machine is a GPU."""
        return self.device == "cuda"

    def pick(self, *, gpu: T, cpu: T) -> T:
        """Sizes that take milliseconds on either."""
        return gpu if self.gpu else cpu

    @property
    def tensors(self) -> str:
        """The device of tensors: "meta" where nothing runs, so that they take no memory."""
        return self.device if self.measures else "meta"

    @property
    def half(self) -> torch.dtype:
        """bfloat16, or float16 where the machine has no other 16 bits."""
        ceilings = self.machine.achievable or self.machine.theoretical
        has = ceilings is None or "bfloat16" in {*ceilings.matrix, *ceilings.vector}
        return torch.bfloat16 if has else torch.float16

    @contextmanager
    def building(self) -> Iterator[None]:
        """Modules are built inside, on `device`: real ones, or fake ones where nothing runs."""
        with nullcontext() if self.measures else nearpeak.fake():
            yield

    @property
    def band(self) -> tuple[float, float]:
        """Between what measured / predicted is to be, where nothing is said."""
        return GPU_BAND if self.gpu else CPU_BAND

    def cluster(self, gpus: int) -> Cluster:
        """So many of this GPU, as they are usually joined; of H100s where the machine is none or its links unknown."""
        try:
            return Cluster.of(self.machine if self.gpu else ELSEWHERE, gpus=gpus)
        except UsageError:
            return Cluster.of(ELSEWHERE, gpus=gpus)

    def estimate(self, fn: Callable[..., Any], *args: Any) -> nearpeak.Estimate:
        """A call on this machine, op by op, on fake tensors."""
        with nearpeak.fake():
            stand_ins = tree_map_only(torch.Tensor, self._stand_in, args)
        return nearpeak.estimate(fn, *stand_ins, on=self.machine)

    def predict(self, fn: Callable[..., Any], *args: Any) -> float:
        """What a call is expected to take: its ops at what kernels reach on this machine.

        A machine of the catalogue whose kernels nobody has measured gives the bound instead.
        """
        found = self.estimate(fn, *args)
        return found.as_written_s if found.expected_s is None else found.expected_s

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the machine for one of "meta", for which torch would choose neither its ops nor kernels."""
        if tensor.device.type != "meta":
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def measure(self, fn: Callable[..., Any], *args: Any, **options: Any) -> float | None:
        """What a call takes, in seconds; None where nothing runs. `options` are those of `nearpeak.bench`."""
        if not self.measures:
            return None
        given = {"max_seconds": SECONDS, "warmup_seconds": 0.05, "other_kinds": False, **options}
        return nearpeak.bench(fn, *args, machine=self.machine, **given).seconds

    def row(
        self,
        what: str,
        fn: Callable[..., Any],
        *args: Any,
        band: tuple[float, float | None] | None = None,
        predicted: float | None = None,
        **options: Any,
    ) -> Row:
        """A call predicted, or with a prediction of one's own, and measured."""
        self.progress(what)
        low, high = band or self.band
        return Row(
            what=what,
            predicted=self.predict(fn, *args) if predicted is None else predicted,
            measured=self.measure(fn, *args, **options),
            low=low,
            high=high,
        )
