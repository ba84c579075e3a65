"""Linear attention, forward and backward: states of segments, and a scan through each segment.

Bytes moved, in units of one tensor of [tokens, heads, dim]: forward 6, of which 2 are keys and values read once more
for the states of segments; where sequences and heads are enough for all processors, there is one segment, and it is 4.
Backward 20 (16 with one segment), where 8 would be the least: 2 for the means, 2 for the states of each direction, and
5, 5 and 4 for the gradients of query, key and value, each of which reads what it needs. Where a program has a part of
the columns alone, others read the same tokens at about the same time, from the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.attention_launch import addressable
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.linear_attention_configs import config_of, segment_of
from nearpeak.kernels.jit.linear_attention_scan import KEY, QUERY, RESULT, VALUE, scan
from nearpeak.kernels.jit.linear_attention_states import AFTER, ALL, BEFORE, states_of
from nearpeak.kernels.jit.linear_attention_tiles import tokens_of

_ROWS = 64
Config = dict[str, Any]


@triton.jit(do_not_specialize=["heads", "tokens", "blocks"])
def linear_attention_means_kernel(
    gradient, result, means, gradient_batch_stride, gradient_head_stride, gradient_stride, result_batch_stride,
    result_head_stride, result_stride, heads, tokens, blocks,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of gradient * result of each query, which is the mean of its gradients by weights."""
    program = tl.program_id(0)
    first = program % blocks * ROWS
    number = (program // blocks).to(tl.int64)
    batch, head = number // heads, number % heads
    gradient += batch * gradient_batch_stride + head * gradient_head_stride
    result += batch * result_batch_stride + head * result_head_stride
    WHOLE: tl.constexpr = VALUE_DIM == BLOCK
    above = tokens_of(gradient, first, gradient_stride, tokens, 0, VALUE_DIM, ROWS, BLOCK, False, WHOLE)
    here = tokens_of(result, first, result_stride, tokens, 0, VALUE_DIM, ROWS, BLOCK, False, WHOLE)
    at = first + tl.arange(0, ROWS)
    mean = tl.sum(above.to(tl.float32) * here.to(tl.float32), 1)
    tl.store(means + number * tokens + at, mean, mask=at < tokens)


class _Problem:
    """Sizes, and what follows from them."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, config: Config | None) -> None:
        self.query, self.key, self.value = addressable(query), addressable(key), addressable(value)
        self.batches, self.key_heads = key.shape[:2]
        self.causal = causal
        self.dtype, self.device = query.dtype, query.device
        dim, value_dim = query.shape[3], value.shape[3]
        self.blocks = (max(next_power_of_2(dim), 16), max(next_power_of_2(value_dim), 16))
        self.constants = (dim, value_dim, *self.blocks)
        self._given = config

    def config(self, kernel: str) -> Config:
        return self._given or config_of(kernel, max(self.blocks), self.dtype, self.device)

    def run(
        self, kind: int, name: str, left: Tensor, right: Tensor, inner: Tensor, outer: Tensor | None, norms: Tensor,
        means: Tensor | None, states: _States, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """A result or gradient, [batch, heads, tokens, dim] with tokens before heads in memory."""
        batches, heads, tokens, _ = left.shape
        dim = inner.shape[3]
        strides = (tokens * heads * dim, dim, heads * dim, 1)
        out = torch.empty_strided((batches, heads, tokens, dim), strides, dtype=self.dtype, device=self.device)
        blocks = self.blocks if kind in (RESULT, VALUE) else self.blocks[::-1]
        config = self.config(name)
        segment = states.segment
        if not self.causal:
            columns = min(config["columns"], blocks[1])
            segment = segment_of(tokens, batches * heads, blocks[1] // columns, config, self.device)
        scan(
            out, kind, self.causal, left, right, inner, outer, norms, means, states.tensor, segment, blocks, eps, config
        )
        return out


class _States:
    """The states that scans of one direction start with."""

    def __init__(
        self, problem: _Problem, keys: Tensor, values: Tensor, which: int, norms: Tensor | None = None,
        means: Tensor | None = None,
    ) -> None:  # fmt: skip
        config = problem.config("linear_attention_states")
        block = problem.blocks[1]
        columns = min(config["columns"], block)
        sequences = problem.batches * (problem.key_heads if which != BEFORE else problem.query.shape[1])
        self.segment = segment_of(keys.shape[2], sequences, block // columns, config, problem.device)
        self.tensor: Tensor | None = None
        if keys.shape[2] > self.segment or not problem.causal:
            self.tensor = states_of(
                keys, values, problem.key_heads, self.segment, which if problem.causal else ALL, config,
                problem.constants, norms, means,
            )  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the sum of the weights of each query, with eps, in float32."""
    problem = _Problem(query, key, value, causal, config)
    query, key, value = problem.query, problem.key, problem.value
    norms = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    states = _States(problem, key, value, BEFORE)
    result = problem.run(RESULT, "linear_attention", query, key, value, None, norms, None, states, eps)
    return result, norms


def backward(
    gradient: Tensor, result: Tensor, norms: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool,
    for_query: bool, for_key: bool, for_value: bool, *, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value; empty tensors for those that nobody wants."""
    problem = _Problem(query, key, value, causal, config)
    query, key, value = problem.query, problem.key, problem.value
    gradient, norms = addressable(gradient), norms.contiguous()
    means = _means(gradient, addressable(result), problem.blocks[1])
    by_query, by_key, by_value = (query.new_empty(0) for _ in range(3))
    if for_query:
        states = _States(problem, key, value, BEFORE)
        by_query = problem.run(
            QUERY, "linear_attention_query", gradient, value, key, query, norms, means, states
        )  # fmt: skip
    if for_key or for_value:
        states = _States(problem, query, gradient, AFTER, norms, means)
        if for_key:
            by_key = problem.run(
                KEY, "linear_attention_key", value, gradient, query, key, norms, means, states
            )  # fmt: skip
        if for_value:
            by_value = problem.run(
                VALUE, "linear_attention_value", key, query, gradient, None, norms, means, states
            )  # fmt: skip
    return by_query, by_key, by_value


def _means(gradient: Tensor, result: Tensor, block: int) -> Tensor:
    batches, heads, tokens, dim = gradient.shape
    means = torch.empty((batches, heads, tokens), dtype=torch.float32, device=gradient.device)
    blocks = triton.cdiv(tokens, _ROWS)
    launch(
        linear_attention_means_kernel, (blocks * heads * batches, 1, 1), gradient, result, means,
        *gradient.stride()[:3], *result.stride()[:3], heads, tokens, blocks, dim, block, _ROWS,
    )  # fmt: skip
    return means
