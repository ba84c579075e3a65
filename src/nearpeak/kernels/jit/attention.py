"""Attention, forward and backward, by the kernels that are the fastest for what is asked on the GPU at hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nearpeak.kernels.jit import attention_backward, attention_forward, attention_hopper_launch
from nearpeak.kernels.jit.attention_launch import Problem


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the logarithms of sums of exponentials, in float32."""
    problem = Problem(*arguments)
    if attention_hopper_launch.takes(problem):
        return attention_hopper_launch.forward(problem)
    return attention_forward.forward(problem)


def backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bias and sinks; empty tensors for those that nobody wants."""
    for_query, for_keys, for_bias, for_sinks = arguments[-4:]
    problem = Problem(*arguments[:-4])
    if attention_hopper_launch.takes(problem):
        return attention_hopper_launch.backward(problem, gradient, lse_gradient, result, lse, for_query, for_keys)
    return attention_backward.backward(
        problem, gradient, lse_gradient, result, lse, for_query, for_keys, for_bias, for_sinks
    )
