"""`linear_attention`: attention with weights that are products of features, linear in the number of tokens.

Memory traffic: forward reads query, key and value and writes the result and one float32 per query and head; backward
reads these and the gradient of the result, and writes three gradients. The kernels read keys and values once more where
a sequence is split into segments, and each gradient reads its own inputs: see `triton`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused
from nearpeak.kernels.attention.reference import empty_token_major, to_token_major

MAX_HEAD_DIM = 128
"""The state of larger heads does not fit into the registers of a multiprocessor."""
EPS = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """1 + elu(x), which is positive."""
    return functional.elu(x) + 1.0


def _check_arguments(query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise UsageError(
            f"linear_attention takes [batch, heads, tokens, dim], and these are {_shapes(query, key, value)}."
        )
    if not all(x.is_floating_point() for x in (query, key, value)):
        raise UsageError(f"linear_attention takes floats; these are {query.dtype}, {key.dtype} and {value.dtype}.")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise UsageError(
            "query, key and value must have one batch, query the dim of key, and value the heads and tokens of key;"
            f" these are {_shapes(query, key, value)}."
        )
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise UsageError(
            f"The {query.shape[1]} heads of queries must be a multiple of the {key.shape[1]} heads of keys."
        )
    if causal and query.shape[2] != key.shape[2]:
        raise UsageError(
            f"Causal linear attention needs a key for each query; these are {query.shape[2]} queries and"
            f" {key.shape[2]} keys. Use causal=False for queries that see all keys."
        )
    if not eps >= 0.0:
        raise UsageError(f"eps must be 0 or above, and this is {eps}.")


def _shapes(*tensors: Tensor) -> str:
    """For error messages alone: torch.compile cannot trace it."""
    return ", ".join(str(list(x.shape)) for x in tensors)


def _quadratic_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float) -> tuple[Tensor, Tensor]:
    """The result and the norms, with all weights in memory; sums are at least in float32."""
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    weights = feature_map(query) @ feature_map(key).mT
    if causal:
        weights = weights.tril()
    norms = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32)) + eps
    shares = (weights / norms[..., None]).to(value.dtype)  # before the product: sums of float16 overflow
    return shares @ value, norms


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of queries."""
    group = query.shape[1] // max(x.shape[1], 1)
    return x if group == 1 else x.repeat_interleave(group, 1)


def _linear_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, eps: float = EPS
) -> Tensor:
    _check_arguments(query, key, value, causal, eps)
    return _quadratic_attention(query, key, value, causal, eps)[0]


def naive_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, eps: float = EPS
) -> Tensor:
    """`linear_attention` as its formula reads: the state of every token, from a cumulative sum.

    It does the fewest operations, and still takes longer than the quadratic form for most lengths: it writes and reads
    dim * value dim elements per token, in the dtype of the tensors. It is a baseline for measurements.
    """
    _check_arguments(query, key, value, causal, eps)
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    queries, keys = feature_map(query), feature_map(key)
    if causal:
        states = (keys[..., :, None] * value[..., None, :]).cumsum(2)
        sums = keys.cumsum(2)
        return torch.einsum("bhtd,bhtdv->bhtv", queries, states) / ((queries * sums).sum(-1, keepdim=True) + eps)
    return queries @ (keys.mT @ value) / (queries @ keys.sum(2)[..., None] + eps)


def _linear_attention_why_not(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, eps: float = EPS
) -> str | None:
    return _operator_why_not(query, key, value)


def _operator_why_not(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str | None:
    if not query.dtype == key.dtype == value.dtype:
        return f"it takes one dtype, and query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    if not query.shape[1]:
        return "there are no heads of queries"
    for size in (query.shape[-1], value.shape[-1]):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"it takes heads of 1 to {MAX_HEAD_DIM} dimensions, and these have {size}"
    return cannot_run(query, key, value)


def _forward_reference(query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float) -> tuple[Tensor, Tensor]:
    result, norms = _quadratic_attention(query, key, value, causal, eps)
    return to_token_major(result), norms.contiguous()


def _backward_reference(
    gradient: Tensor, result: Tensor, norms: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool,
    for_query: bool, for_key: bool, for_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = norms.dtype
    queries, gradient = feature_map(query.to(wide)), gradient.to(wide)
    keys, values = (_repeat_heads(x.to(wide), query) for x in (feature_map(key), value))
    shares = queries @ keys.mT / norms[..., None]
    by_weight = gradient @ values.mT - (gradient * result.to(wide)).sum(-1, keepdim=True)
    by_weight = by_weight / norms[..., None]
    if causal:
        shares, by_weight = shares.tril(), by_weight.tril()

    def sum_over_group(x: Tensor, like: Tensor, derivative: bool) -> Tensor:
        x = x.unflatten(1, (like.shape[1], -1)).sum(2)
        if derivative:
            x = x * torch.where(like > 0, 1.0, like.to(wide).exp())
        return to_token_major(x.to(like.dtype))

    return (
        sum_over_group(by_weight @ keys, query, True) if for_query else query.new_empty(0),
        sum_over_group(by_weight.mT @ queries, key, True) if for_key else query.new_empty(0),
        sum_over_group(shares.mT @ gradient, value, False) if for_value else query.new_empty(0),
    )


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float) -> tuple[Tensor, Tensor]:
    batches, heads, queries, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    result = empty_token_major(value, batches, heads, queries, value.shape[-1])
    return result, query.new_empty((batches, heads, queries), dtype=wide)


def _fake_backward(
    gradient: Tensor, result: Tensor, norms: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool,
    *wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(
        empty_token_major(x, *x.shape) if needed else query.new_empty(0)
        for x, needed in zip((query, key, value), wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, causal, _ = inputs
    ctx.save_for_backward(*output, query, key, value)
    ctx.causal = causal
    ctx.mark_non_differentiable(output[1])


def _autograd_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:3]
    gradients = _backward(gradient, *ctx.saved_tensors, ctx.causal, *wanted)
    return (*(x if needed else None for x, needed in zip(gradients, wanted, strict=True)), None, None)


_backward = Operator(
    "linear_attention_backward(Tensor gradient, Tensor result, Tensor norms, Tensor query, Tensor key, Tensor value,"
    " bool causal, bool for_query, bool for_key, bool for_value) -> (Tensor, Tensor, Tensor)",
    backends={"nvidia": "linear_attention.triton:backward"},
    reference=_backward_reference,
    fake=_fake_backward,
    why_not=lambda gradient, result, norms, *rest: _operator_why_not(*rest) or cannot_run(gradient, result, norms),
)
_forward = Operator(
    "linear_attention(Tensor query, Tensor key, Tensor value, bool causal, float eps) -> (Tensor, Tensor)",
    backends={"nvidia": "linear_attention.triton:forward"},
    reference=_forward_reference,
    fake=_fake_forward,
    why_not=_operator_why_not,
    setup_context=_setup_context,
    backward=_autograd_backward,
)


@fused(reference=_linear_attention_reference, why_not=_linear_attention_why_not)
def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, eps: float = EPS) -> Tensor:
    """f(query) @ (f(key)^T @ value) / (f(query) @ sum of f(key) + eps) for each head, where f(x) = 1 + elu(x).

    >>> import torch, nearpeak.kernels as kernels
    >>> x = torch.tensor([[[[1.0], [3.0]]]])
    >>> kernels.linear_attention(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), x, eps=0.0)
    tensor([[[[1.],
              [2.]]]])

    Args:
        query: [batch, heads, queries, dim], with any strides. Tensors whose last stride is not 1 are copied first.
        key: [batch, key heads, keys, dim]. The number of heads is a multiple of the number of key heads: consecutive
            heads of queries share a head of keys (grouped-query attention), which is not repeated in memory.
        value: [batch, key heads, keys, value dim], which may differ from dim. The kernel supports up to 128 of both.
        causal: A query sees the keys up to its own, and there are as many keys as queries. Otherwise it sees all.
        eps: Added to the sum of weights.

    The result is [batch, heads, queries, value dim] in the dtype of the value, with tokens before heads in memory:
    `result.transpose(1, 2).flatten(2)` does not copy.

    In bfloat16, features are rounded to it for products, and all sums, including the running state, are in float32.
    float16 is computed in tf32, which has as many bits, since sums over tokens exceed its range. float32 is computed
    in full precision, without tensor cores, and is slow. The backward pass saves the inputs, the result and the sums of
    weights. Gradients are bitwise reproducible.
    """
    _check_arguments(query, key, value, causal, eps)
    result, _ = _forward(query, key, value, causal, float(eps))
    return result  # type: ignore[no-any-return]


class LinearAttention(torch.nn.Module):
    """`linear_attention` as a module: `module(query, key, value)`."""

    def __init__(self, *, causal: bool = True, eps: float = EPS) -> None:
        super().__init__()
        self.causal, self.eps = causal, eps

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return linear_attention(query, key, value, causal=self.causal, eps=self.eps)

    def extra_repr(self) -> str:
        return f"causal={self.causal!r}, eps={self.eps!r}"
