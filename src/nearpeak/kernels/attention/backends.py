"""The table of attention backends: for each call, the first one that supports it on its device runs.

A backend is a module with `takes(problem)`, `forward(problem)` and `backward(problem, ...)`. Kernels for another vendor
or architecture are one more row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels.attention.triton import AttentionProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Kernels of attention."""

    module: str
    """Imported at the first call that may use it, as not every version of Triton has Gluon."""
    runs_on: Callable[[torch.device], bool]


BACKENDS = (
    Backend(module="nearpeak.kernels.attention.sm90", runs_on=lambda device: gluon.runs_on(device)),
    Backend(module="nearpeak.kernels.attention.triton", runs_on=lambda device: True),
)
"""Fastest first."""


def backend_of(problem: AttentionProblem) -> Any:
    """The module of the first backend that takes a problem."""
    for backend in BACKENDS:
        if backend.runs_on(problem.query.device):
            module: Any = import_module(backend.module)
            if module.takes(problem):
                return module
    raise AssertionError("the portable kernels take every problem")


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result, token-major in memory, and the log-sum-exp of the scores in float32."""
    problem = AttentionProblem(*arguments)
    result: tuple[Tensor, Tensor] = backend_of(problem).forward(problem)
    return result


def backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bias and sinks; empty tensors for those that are not needed."""
    *inputs, for_query, for_keys, for_bias, for_sinks = arguments
    problem = AttentionProblem(*inputs)
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = backend_of(problem).backward(
        problem, gradient, lse_gradient, result, lse, for_query, for_keys, for_bias, for_sinks
    )
    return gradients
