"""`Fault`: a fault that nearpeak puts into one rank of a job, so that users see what the profile makes of it."""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from nearpeak.devices.backends import gpu_in_use
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.trace.patches.shared_patch import patch_attribute

FaultKind = Literal["delay", "input", "work", "gc"]
_TIME = re.compile(r"(\d+(?:\.\d*)?)(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MATRIX = 192
_TIMED_PRODUCTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens in each step of a rank, or in every n-th one."""

    rank: int
    kind: FaultKind
    seconds: float
    every: int = 1


def read_fault(text: str) -> Fault:
    """A fault from the command line: rank=2,delay=5ms; UsageError for anything else.

    >>> read_fault("rank=2,delay=5ms")
    Fault(rank=2, kind='delay', seconds=0.005, every=1)
    """
    values = dict(part.strip().partition("=")[::2] for part in text.split(","))
    kinds = [name for name in values if name in get_args(FaultKind)]
    unknown = [name for name in values if name not in (*get_args(FaultKind), "rank", "every")]
    if unknown:
        raise UsageError(
            f"--inject {text}: {unknown[0]!r} is not known. "
            f"{did_you_mean(unknown[0], ('rank', 'every', *get_args(FaultKind)))}"
        )
    amount = _TIME.fullmatch(values[kinds[0]]) if len(kinds) == 1 else None
    if amount is None or not values.get("rank", "").isdigit() or not values.get("every", "1").isdigit():
        raise UsageError(
            f"--inject {text}: write rank=N and one of delay=5ms, input=5ms, work=5ms, gc=5ms; every=4 leaves three of "
            "four steps as they are."
        )
    return Fault(
        rank=int(values["rank"]),
        kind=kinds[0],  # type: ignore[arg-type]  # one of them
        seconds=float(amount[1]) * _UNITS[amount[2]],
        every=max(1, int(values.get("every", "1"))),
    )


class FaultInjector:
    """Does what a fault says, on its rank alone. `step_begins` is called at the start of each step."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self._fault = fault if fault.rank == rank else None
        self._steps = 0
        self._products = 0

    def step_begins(self) -> None:
        """The part of the fault that needs no data loader."""
        self._steps += 1
        fault = self._fault
        if fault is None or self._steps % fault.every:
            return
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.kind == "work":
            self._work(fault.seconds)
        elif fault.kind == "gc":
            _collect(fault.seconds)

    @contextmanager
    def slow_loaders(self) -> Iterator[None]:
        """Inside, batches of data loaders come late if the fault says so."""
        fault = self._fault
        if fault is None or fault.kind != "input":
            yield
            return
        loaders: Any = sys.modules.get("torch.utils.data.dataloader") or torch.utils.data.dataloader
        original = loaders._BaseDataLoaderIter.__next__

        def late_batch(iterator: Any) -> Any:
            if self._steps % fault.every == 0:
                time.sleep(fault.seconds)
            return original(iterator)

        with patch_attribute(loaders._BaseDataLoaderIter, "__next__", late_batch):
            yield

    def _work(self, seconds: float) -> None:
        """Products of matrices: as many in each step as take so long in the first one."""
        backend = gpu_in_use()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            matrix = torch.ones(_MATRIX, _MATRIX, device="cpu" if backend is None else "cuda")
            if not self._products:
                torch.mm(matrix, matrix)
                if backend is not None:
                    backend.synchronize()
                times = []
                for _ in range(_TIMED_PRODUCTS):
                    begun = time.perf_counter()
                    torch.mm(matrix, matrix)
                    if backend is not None:
                        backend.synchronize()
                    times.append(time.perf_counter() - begun)
                self._products = max(1, round(seconds / max(min(times), 1e-6)))  # other work may interrupt most
            for _ in range(self._products):
                torch.mm(matrix, matrix)


def _collect(seconds: float) -> None:
    """Full collections, at least one, for so long: objects made for a shorter one would take longer to make."""
    begun = time.perf_counter()
    gc.collect()
    while time.perf_counter() - begun < seconds:
        gc.collect()
