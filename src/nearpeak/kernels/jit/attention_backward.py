"""The backward pass of attention: what a query's gradients by weights are in the mean, and then each gradient.

Weights are computed again from the logarithms of sums. The gradients of keys and values have a kernel, and that of
queries another: each is summed up in registers, in the same order each time, and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.attention_bias import bias_backward
from nearpeak.kernels.jit.attention_configs import keys_heuristic, queries_heuristic
from nearpeak.kernels.jit.attention_keys import attention_keys_kernel
from nearpeak.kernels.jit.attention_launch import Problem, addressable
from nearpeak.kernels.jit.attention_queries import attention_queries_kernel
from nearpeak.kernels.jit.attention_scores import tile
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.rows import LOG2_E

_ROWS = 64


@triton.jit(do_not_specialize=["heads", "queries", "padded", "blocks"])
def attention_means_kernel(
    gradient, result, lse, lse_gradient, sums, means, gradient_batch_stride, gradient_head_stride, gradient_stride,
    result_batch_stride, result_head_stride, result_stride, heads, queries, padded, blocks,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The mean of the gradients by weights, which is the sum of gradient * result, less the gradient of the lse.

    And the logarithm of the sum to the base 2, infinity for a query that sees nothing, so that its weights are 0, and
    for those up to a padded number that do not exist.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what comes next begins with the first, then in the cache
    first = program % blocks * ROWS
    number = (program // blocks).to(tl.int64)
    batch, head = number // heads, number % heads
    gradient += batch * gradient_batch_stride + head * gradient_head_stride
    result += batch * result_batch_stride + head * result_head_stride
    above = tile(gradient, first, gradient_stride, queries, ROWS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    here = tile(result, first, result_stride, queries, ROWS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    mean = tl.sum(above.to(tl.float32) * here.to(tl.float32), 1)
    at = first + tl.arange(0, ROWS)
    if lse_gradient is not None:
        mean -= tl.load(lse_gradient + number * queries + at, mask=at < queries, other=0.0)
    tl.store(means + number * padded + at, mean, mask=at < padded)
    logarithm = tl.load(lse + number * queries + at, mask=at < queries, other=float("-inf"))
    logarithm = tl.where(logarithm == float("-inf"), float("inf"), logarithm * LOG2_E)
    tl.store(sums + number * padded + at, logarithm, mask=at < padded)


def statistics(
    problem: Problem, gradient: Tensor, lse: Tensor, lse_gradient: Tensor | None, result: Tensor, padded: int
) -> tuple[Tensor, Tensor]:
    """Logarithms of sums, to the base 2, and means, of so many queries, each [batch, heads, queries]."""
    sums, means = (torch.empty((*lse.shape[:2], padded), dtype=torch.float32, device=lse.device) for _ in range(2))
    blocks = triton.cdiv(padded, _ROWS)
    launch(
        attention_means_kernel, (blocks * problem.heads * problem.batches, 1, 1), gradient, result,
        lse, None if lse_gradient is None else lse_gradient.contiguous(), sums, means, *gradient.stride()[:3],
        *result.stride()[:3], problem.heads, problem.queries, padded, blocks, problem.value_dim,
        problem.block_value_dim, _ROWS,
    )  # fmt: skip
    return sums, means


def backward(
    problem: Problem, gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor,
    for_query: bool, for_keys: bool, for_bias: bool, for_sinks: bool, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; empty tensors for those that nobody wants."""
    gradient, lse = addressable(gradient), lse.contiguous()
    sums, means = statistics(problem, gradient, lse, lse_gradient, addressable(result), problem.queries)
    inputs = (problem.query, problem.key, problem.value, gradient, sums, means)
    of_all = (
        problem.bias,
        problem.slopes,
        *problem.of_both(),
        *problem.strides(),
        *_gradient_strides(problem, gradient),
    )
    by_query = by_key = by_value = by_bias = by_sinks = gradient.new_empty(0)
    if for_keys:
        by_key = problem.by_token(problem.batches, problem.keys, problem.key_heads, problem.dim)
        by_value = problem.by_token(problem.batches, problem.keys, problem.key_heads, problem.value_dim)
        chosen = config or problem.tuned("attention_keys")
        chosen = chosen or keys_heuristic(problem.widest, problem.itemsize)
        blocks = triton.cdiv(problem.most_keys, chosen["keys"])
        launch(
            attention_keys_kernel, (blocks * problem.key_heads * problem.sequences, 1, 1), *inputs, by_key, by_value,
            *of_all, *problem.numbers(blocks), *problem.constants(), chosen["queries"], chosen["keys"],
            warps=chosen["warps"], stages=chosen["stages"],
        )  # fmt: skip
    if for_query:
        by_query = problem.by_token(problem.batches, problem.queries, problem.heads, problem.dim)
        chosen = config or problem.tuned("attention_queries")
        chosen = chosen or queries_heuristic(problem.widest, problem.itemsize)
        blocks = triton.cdiv(problem.most_queries, chosen["queries"])
        launch(
            attention_queries_kernel, (blocks * problem.heads * problem.sequences, 1, 1), *inputs, by_query,
            *of_all, *problem.numbers(blocks), *problem.constants(), chosen["queries"], chosen["keys"],
            warps=chosen["warps"], stages=chosen["stages"],
        )  # fmt: skip
    if for_bias and problem.given_bias is not None:
        by_bias = bias_backward(problem, gradient, sums, means, problem.given_bias)
    if for_sinks and problem.sinks is not None:
        by_sinks = sinks_backward(problem.sinks, lse, means)
    return by_query, by_key, by_value, by_bias, by_sinks


def _gradient_strides(problem: Problem, gradient: Tensor) -> tuple[int, ...]:
    batch, head, token = gradient.stride()[:3]
    return (0 if problem.packed else batch, head, token)


def sinks_backward(sinks: Tensor, lse: Tensor, means: Tensor) -> Tensor:
    """The gradient of sinks: the weight of each times what its gradient is short of the mean, which is all of it."""
    logarithms = sinks.to(lse.dtype)[:, None] - lse
    weights = torch.where(lse == float("-inf"), 0.0, logarithms.exp())
    return -(weights * means).sum((0, 2)).to(sinks.dtype)
