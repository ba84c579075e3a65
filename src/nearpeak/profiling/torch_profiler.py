"""`DeviceMarks`: when steps ended on the device's own clock, without anybody waiting for it."""

from __future__ import annotations

from itertools import pairwise

import torch


class StepEvents:
    """Moments in the device's order of work. Where no GPU is in use there are none."""

    def __init__(self) -> None:
        self._made: list[torch.cuda.Event] = []
        self._spare: list[torch.cuda.Event] = []

    def prepare(self, count: int) -> None:
        """Makes what is needed for so many moments: that takes longer than to note one."""
        self._spare = _events(count)

    def clear(self) -> None:
        """Forgets all moments."""
        self._made.clear()

    def mark(self) -> None:
        """Notes that the device got here."""
        if self._spare:
            self._spare[-1].record()
            self._made.append(self._spare.pop())

    def seconds(self) -> list[float]:
        """From each moment to the next one; the device must have passed the last."""
        return [one.elapsed_time(two) / 1e3 for one, two in pairwise(self._made)]


def has_gpu() -> bool:
    """Whether a GPU is in use."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _events(count: int) -> list[torch.cuda.Event]:
    if not has_gpu():
        return []
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]
