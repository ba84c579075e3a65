"""The operators of attention, forward and backward; the backward pass makes the gradients that are wanted alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.operations.attention_reference import as_by_token, new_by_token, plain, plain_backward
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run

WIDEST = 256
"""Heads of more dimensions do not fit into a processor's registers and memory."""
_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? seed,"
    " Tensor? query_starts, Tensor? key_starts"
)
_OPTIONS = (
    "int longest_query, int longest_key, int left, int right, bool bottom_right, float scale, float softcap,"
    " float dropout"
)
_SLOPES = 4


def refuses(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str | None:
    """Why the kernels do not take the arguments of the operator."""
    if not query.dtype == key.dtype == value.dtype:
        return f"it takes one dtype, and query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    for size in (query.shape[-1], value.shape[-1]):
        if not 1 <= size <= WIDEST:
            return f"it takes heads of 1 to {WIDEST} dimensions, and these have {size}"
    return cannot_run(query, key, value, *(one for one in rest if isinstance(one, Tensor)))


def _refuses_backward(gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *rest: Any) -> Any:
    return refuses(*rest) or cannot_run(gradient, lse_gradient, result, lse)


def _operator_reference(*args: Any) -> tuple[Tensor, Tensor]:
    result, lse = plain(*args)
    return as_by_token(result), lse.contiguous()


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batches, heads, queries, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    result = new_by_token(value, batches, heads, queries, value.shape[-1])
    return result, query.new_empty((batches, heads, queries), dtype=wide)


def _fake_backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, query: Tensor, key: Tensor,
    value: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    for_query, for_keys, for_bias, for_sinks = rest[-4:]

    def by_token(x: Tensor, wanted: bool) -> Tensor:
        return new_by_token(x, *x.shape) if wanted else query.new_empty(0)

    return (
        by_token(query, for_query), by_token(key, for_keys), by_token(value, for_keys),
        bias.new_empty(bias.shape) if for_bias and bias is not None else query.new_empty(0),
        sinks.new_empty(sinks.shape) if for_sinks and sinks is not None else query.new_empty(0),
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)  # that of the logarithms is seldom wanted, and then not read


def _gradients(ctx: Any, gradient: Tensor | None, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, result, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    if needed[_SLOPES]:
        raise RuntimeError("nearpeak::attention has no gradient of slopes. Use nearpeak.kernels.attention, which has.")
    if gradient is None:
        gradient = torch.zeros_like(result)
    wanted = (needed[0], needed[1] or needed[2], needed[3], needed[5])
    found = _backward(gradient, lse_gradient, result, lse, *tensors, *ctx.options, *wanted)
    query, key, value, bias, sinks = found
    places = [query, key, value, bias, None, sinks]
    return (*(one if need else None for one, need in zip(places, needed, strict=False)), *[None] * 11)


_backward = Operator(
    f"attention_backward(Tensor gradient, Tensor? lse_gradient, Tensor result, Tensor lse, {_TENSORS}, {_OPTIONS},"
    " bool for_query, bool for_keys, bool for_bias, bool for_sinks) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch="attention:backward",
    reference=plain_backward,
    fake=_fake_backward,
    why_not=_refuses_backward,
)
attend = Operator(
    f"attention({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    launch="attention:forward",
    reference=_operator_reference,
    fake=_fake,
    why_not=refuses,
    setup_context=_setup_context,
    backward=_gradients,
)
