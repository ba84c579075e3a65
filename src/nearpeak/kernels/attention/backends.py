"""The backends of attention: for each call, the fastest kernels that support it on its GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nearpeak.kernels.attention import sm90_launch
from nearpeak.kernels.attention import triton as attention_triton
from nearpeak.kernels.attention.triton import AttentionProblem


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the logarithms of sums of exponentials, in float32."""
    problem = AttentionProblem(*arguments)
    if sm90_launch.takes(problem):
        return sm90_launch.forward(problem)
    return attention_triton.forward(problem)


def backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bias and sinks; empty tensors for those that nobody wants."""
    for_query, for_keys, for_bias, for_sinks = arguments[-4:]
    problem = AttentionProblem(*arguments[:-4])
    if sm90_launch.takes(problem):
        return sm90_launch.backward(problem, gradient, lse_gradient, result, lse, for_query, for_keys)
    return attention_triton.backward(
        problem, gradient, lse_gradient, result, lse, for_query, for_keys, for_bias, for_sinks
    )
