"""`as_on`: code that runs inside on the CPU's fake tensors runs the operators of a target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nearpeak.capture.lowering import attention, autocast, layers, recurrent
from nearpeak.capture.lowering.optimizers import optimizers_as_on_gpu
from nearpeak.capture.lowering.register import lowered
from nearpeak.capture.lowering.target import Target
from nearpeak.kernels.policy import standing_for_gpu

__all__ = ["as_on", "attention", "autocast", "layers", "recurrent"]


@contextmanager
def as_on(target: Target | None) -> Iterator[None]:
    """Inside, operators and optimizers are those of the target; None and a CPU change nothing."""
    if target is None or target.kind == "cpu":
        yield
        return
    with lowered(target), optimizers_as_on_gpu(), standing_for_gpu(target.capability):
        if torch.is_autocast_enabled("cpu"):
            autocast.cast_as_on_cuda()
        yield
