"""Attention by the kernels that torch has: cuDNN's and FlashAttention-2, as `scaled_dot_product_attention` runs them.

All backends exchange the result and the log-sum-exp of a forward pass, so that a backward pass may take another one.
Results have the order of tokens and heads in memory that the query has.

Backward passes of both add in no fixed order: they do not run inside of `torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels._runtime.choice import torch_runs_on
from nearpeak.kernels.attention.triton import AttentionProblem, Gradients

_aten: Any = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 8
"""torch would pad other sizes of heads first."""


def supported(problem: AttentionProblem, *, backward: bool) -> list[str]:
    """Which of "cudnn" and "flash" take a problem: plain scores, full or causal, of as many queries as keys."""
    if not (
        torch_runs_on(problem.query.device)
        and problem.query.dtype in _DTYPES
        and problem.is_plain
        and not problem.packed
        and problem.sinks is None
        and problem.seed is None
        and problem.dropout == 0.0
        and problem.left < 0
        and (problem.right == -1 or (problem.right == 0 and problem.queries == problem.keys))
        and problem.dim % _MULTIPLE == 0
        and problem.value_dim % _MULTIPLE == 0
        and 0 not in (problem.batches, problem.queries, problem.keys)
        and all(map(_has_own_elements, (problem.query, problem.key, problem.value)))
    ):
        return []
    if backward and torch.are_deterministic_algorithms_enabled():
        return []
    # what a backward pass supports may differ, and shows in whether the query requires a gradient
    query = problem.query.detach().requires_grad_() if backward else problem.query
    params = torch.backends.cuda.SDPAParams(
        query, problem.key, problem.value, None, 0.0, problem.right == 0, problem.group > 1
    )
    backends = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
    }
    return [name for name, can_use in backends.items() if can_use(params)]


def _has_own_elements(x: Tensor) -> bool:
    """Whether each element has an address of its own."""
    return all(stride > 0 for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def forward(name: str, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of the scores in float32."""
    inputs, causal = (problem.query, problem.key, problem.value), problem.right == 0
    if name == "cudnn":
        # no bias; with the log-sum-exp; no dropout; no mask for debugging
        outputs = _aten._scaled_dot_product_cudnn_attention(
            *inputs, None, True, 0.0, causal, False, scale=problem.scale
        )
    else:
        outputs = _aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=problem.scale)
    return outputs[0], outputs[1].view(problem.batches, problem.heads, problem.queries)


def backward(
    name: str, problem: AttentionProblem, gradient: Tensor, result: Tensor, lse: Tensor, for_query: bool,
    for_keys: bool,
) -> Gradients:  # fmt: skip
    """The gradients of query, key and value, which are computed together."""
    if gradient.stride(-1) != 1 or not _has_own_elements(gradient):
        gradient = gradient.contiguous()
    inputs = (gradient, problem.query, problem.key, problem.value, result)
    causal = problem.right == 0
    unused = torch.empty(2, dtype=torch.int64, device=gradient.device)  # the state of dropout's random numbers
    if name == "cudnn":
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            *inputs, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None, problem.queries, problem.keys,
            0.0, causal, scale=problem.scale,
        )  # fmt: skip
    else:
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *inputs, lse.contiguous(), None, None, problem.queries, problem.keys, 0.0, causal, unused, unused,
            scale=problem.scale,
        )  # fmt: skip
    by_query, by_key, by_value = gradients
    empty = gradient.new_empty(0)
    if not for_keys:
        by_key = by_value = empty
    return by_query if for_query else empty, by_key, by_value, empty, empty
