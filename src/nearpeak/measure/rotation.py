"""A cold cache by rotation: every call works on another copy of the inputs, until all of them have left the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nearpeak.errors import UsageError
from nearpeak.measure.case import Case

MOST_COPIES = 256


def rotating(case: Case, cache_bytes: float) -> Callable[[], Any]:
    """The case's call on a new copy of its tensors each time, over at least three times the cache."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in case.tensors())
    if not size:
        raise UsageError(f"{case.name} has no tensor arguments to rotate: pass them as arguments or use evict='flush'.")
    copies = math.ceil(3 * cache_bytes / size) + 1
    if copies > MOST_COPIES:
        raise UsageError(
            f"{case.name} would need {copies} copies of its inputs to leave the cache: use evict='flush' instead."
        )
    cases = [case, *(_copy_of(case) for _ in range(copies - 1))]
    position = 0

    def call() -> Any:
        nonlocal position
        position = (position + 1) % copies
        return cases[position].call()

    return call


def _copy_of(case: Case) -> Case:
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        return value

    return case.with_arguments(copy(case.args), copy(dict(case.kwargs)))
