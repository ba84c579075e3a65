"""Section "launch" of `benchmarks.kernels`: host time of calls on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.kernels.cases import random_tensor
from nearpeak import kernels

SIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCase:
    """An operation on small tensors, without gradients."""

    operation: str
    torch_ops: int
    """How many operations torch runs for the same."""
    nearpeak: Callable[[], Any]
    eager: Callable[[], Any]


def launch_cases(side: int = SIDE, device: str = "cuda") -> Iterator[LaunchCase]:
    """Called inside of torch.no_grad()."""
    x, y = (random_tensor(side, side, device=device, grad=False) for _ in range(2))
    weight, bias = (random_tensor(side, device=device, grad=False) for _ in range(2))
    shape = weight.shape
    yield LaunchCase(operation="add", torch_ops=1, nearpeak=lambda: kernels.add(x, y), eager=lambda: torch.add(x, y))
    yield LaunchCase(
        operation="softmax",
        torch_ops=1,
        nearpeak=lambda: kernels.softmax(x),
        eager=lambda: torch.softmax(x, -1),
    )
    yield LaunchCase(
        operation="rms_norm",
        torch_ops=1,
        nearpeak=lambda: kernels.rms_norm(x, weight),
        eager=lambda: functional.rms_norm(x, shape, weight, 1e-6),
    )
    yield LaunchCase(
        operation="layer_norm",
        torch_ops=1,
        nearpeak=lambda: kernels.layer_norm(x, weight, bias),
        eager=lambda: functional.layer_norm(x, shape, weight, bias),
    )
    yield LaunchCase(
        operation="swiglu",
        torch_ops=2,
        nearpeak=lambda: kernels.swiglu(x, y),
        eager=lambda: functional.silu(x) * y,
    )
