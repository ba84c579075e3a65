"""The backends of attention, and which of them runs.

"gluon" (`sm90`) and "triton" are this package's kernels. "cudnn" and "flash" are torch's, cuDNN's and FlashAttention-2,
as `scaled_dot_product_attention` runs them; their backward passes add in no fixed order, and do not run inside of
`torch.use_deterministic_algorithms(True)`. Forward and backward passes choose on their own: what they exchange, the
result and the log-sum-exp, is the same for all. Results have the order of tokens and heads in memory that queries have.
Kernels for another vendor or architecture are one more name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.choice import OF_TORCH, Chooser, torch_runs_on
from nearpeak.kernels.attention import fp8_triton
from nearpeak.kernels.attention.triton import AttentionProblem, Gradients

_aten: Any = torch.ops.aten
_MODULES = {"gluon": "nearpeak.kernels.attention.sm90", "triton": "nearpeak.kernels.attention.triton"}
"""Imported at the first call that may use it, as not every version of Triton has Gluon."""
_TORCH_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_MULTIPLE = 8
"""torch would pad other sizes of heads first."""
FEATURES = {
    "heads": 0.5, "group": 0.5, "queries": 0.5, "keys": 0.5, "dim": 1.0, "value_dim": 1.0, "causal": 1.0, "window": 0.1,
    "packed": 1.0, "tokens_first": 1.0, "itemsize": 0.5,
}  # fmt: skip
"""By which a backend is chosen, with their weights: heads of all batches, and heads of queries that share a head of
keys."""

_forward_chooser = Chooser("attention", FEATURES)
_backward_chooser = Chooser("attention_backward", FEATURES)


def candidates(problem: AttentionProblem, *, backward: bool = False) -> list[str]:
    """The backends that take a problem: torch's first, then this package's, the fastest first."""
    names = _torch_candidates(problem, backward=backward)
    if gluon.runs_on(problem.query.device) and import_module(_MODULES["gluon"]).takes(problem, backward=backward):
        names.append("gluon")
    return [*names, "triton"]


def features(problem: AttentionProblem) -> tuple[float, ...]:
    """The values of `FEATURES`."""
    query = problem.query
    return (
        problem.batches * problem.heads, problem.group, problem.max_queries, problem.max_keys, problem.dim,
        problem.value_dim, problem.right >= 0, max(problem.left, 0), problem.packed,
        query.stride(1) <= query.stride(2), problem.itemsize,
    )  # fmt: skip


def choose(problem: AttentionProblem, *, backward: bool = False, only_own: bool = False) -> str:
    """The name of the backend that runs.

    Args:
        only_own: Whether torch's are no candidates, which take no gradient of the log-sum-exp.
    """
    chooser = _backward_chooser if backward else _forward_chooser
    tensors = (problem.query, problem.key, problem.value)
    key = (
        *((x.shape, x.stride(), x.data_ptr() & 15) for x in tensors), problem.query.dtype, problem.query.device,
        problem.is_plain, problem.packed, problem.max_queries, problem.max_keys, problem.left, problem.right,
        problem.bottom_right, problem.sinks is None, problem.seed is None, problem.dropout == 0.0, only_own,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    known = chooser.known(key)
    if known is not None:
        return known
    names = candidates(problem, backward=backward)
    if only_own:
        names = [name for name in names if name not in OF_TORCH]
    return chooser.choose(key, names, features(problem), problem.query.device)


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of the scores in float32."""
    problem = AttentionProblem(*arguments)
    name = choose(problem)
    if name in OF_TORCH:
        return _torch_forward(name, problem)
    result: tuple[Tensor, Tensor] = import_module(_MODULES[name]).forward(problem)
    return result


def fp8_why_not(query: Tensor, key: Tensor, value: Tensor, right: int, bottom_right: bool, scale: float) -> str | None:
    """Why the forward pass in fp8 does not run for tensors that it takes by their sizes, or None."""
    if not gluon.runs_on(query.device) or query.device.type != "cuda":
        return "it needs a Hopper GPU and Triton 3.6"
    problem = _fp8_problem(query, key, value, right, bottom_right, scale)
    takes = import_module(_MODULES["gluon"]).supports_fp8(problem)
    return None if takes else "it takes tensors whose rows begin at multiples of 16 bytes, and some of each"


def forward_fp8(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result of operands in 8 bits, and the log-sum-exp of the scores in float32."""
    problem = _fp8_problem(*arguments)
    operands = fp8_triton.quantized(problem.query, problem.key, problem.value)
    result: tuple[Tensor, Tensor] = import_module(_MODULES["gluon"]).forward(problem, operands)
    return result


def _fp8_problem(
    query: Tensor, key: Tensor, value: Tensor, right: int, bottom_right: bool, scale: float
) -> AttentionProblem:
    return AttentionProblem(
        query, key, value, None, None, None, None, None, None, 0, 0, -1, right, bottom_right, scale, 0.0, 0.0
    )


def backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *arguments: Any
) -> Gradients:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; empty tensors for those that are not needed."""
    *inputs, for_query, for_keys, for_bias, for_sinks = arguments
    problem = AttentionProblem(*inputs)
    name = choose(problem, backward=True, only_own=lse_gradient is not None)
    if name in OF_TORCH:
        return _torch_backward(name, problem, gradient, result, lse, for_query, for_keys)
    gradients: Gradients = import_module(_MODULES[name]).backward(
        problem, gradient, lse_gradient, result, lse, for_query, for_keys, for_bias, for_sinks
    )
    return gradients


def _torch_candidates(problem: AttentionProblem, *, backward: bool) -> list[str]:
    """Which of "cudnn" and "flash" take a problem: plain scores, full or causal, of as many queries as keys."""
    if not (
        torch_runs_on(problem.query.device)
        and problem.query.dtype in _TORCH_DTYPES
        and problem.is_plain
        and not problem.packed
        and problem.sinks is None
        and problem.seed is None
        and problem.dropout == 0.0
        and problem.left < 0
        and (problem.right == -1 or (problem.right == 0 and problem.queries == problem.keys))
        and problem.dim % _HEAD_MULTIPLE == 0
        and problem.value_dim % _HEAD_MULTIPLE == 0
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


def _torch_forward(name: str, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
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


def _torch_backward(
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
