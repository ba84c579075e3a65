"""`rotary` and `rotary_pair`: rotary position embeddings, which rotate pairs of numbers in each head.

Computed in float32 and rounded once. Bytes moved, forward and backward: x is read once and written once, cosines and
sines are read once for each token. Cosines, sines and positions are saved for the backward pass, and nothing of x: its
gradient is the upstream gradient rotated back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused


def rotate_reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int,
) -> Tensor:  # fmt: skip
    """x rotated, in plain torch."""
    length = x.shape[-2 if heads_first else -3]
    cos, sin = (_angles(table, positions, length, interleaved, rotary_dim) for table in (cos, sin))
    cos, sin = (table.unsqueeze(-3 if heads_first else -2) for table in (cos, sin))
    if reverse:
        sin = -sin
    wide = x[..., :rotary_dim].to(torch.promote_types(x.dtype, cos.dtype))  # so that gradients are rounded once
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, -1)
    pairs = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), -1)


def _angles(table: Tensor, positions: Tensor | None, length: int, interleaved: bool, rotary_dim: int) -> Tensor:
    """The row of a table for each token, (seq, pairs) or (batch, seq, pairs)."""
    table = table[..., :length, :] if positions is None else table[positions]
    if table.shape[-1] != rotary_dim:
        return table
    return table[..., ::2] if interleaved else table[..., : rotary_dim // 2]


def _rotate_in_place_reference(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, heads_first: bool, rotary_dim: int,
) -> None:  # fmt: skip
    for x in tensors:
        x.copy_(rotate_reference(x, cos, sin, positions, interleaved, False, heads_first, rotary_dim))


def _why_not_tensors(tensors: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None) -> str | None:
    if any(x.dtype != tensors[0].dtype or not x.is_floating_point() for x in tensors):
        return "it takes floating-point tensors of one dtype"
    if cos.requires_grad or sin.requires_grad:
        return "it has no gradients of cosines and sines"
    if tensors[0].numel() // max(1, tensors[0].shape[-1]) > 2**31 - 2**16:
        return "it takes up to 2**31 - 2**16 heads of tokens"
    return cannot_run(*tensors, cos, sin, positions)


def _why_not_in_place(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, *rest: Any
) -> str | None:
    for x in tensors:
        if x.stride(-1) != 1:
            return "it rotates in place where the last stride is 1"
        if any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
            return "it cannot rotate an expanded tensor in place"
    return _why_not_tensors(tensors, cos, sin, positions)


def empty_result(x: Tensor, *rest: Any) -> Tensor:
    """Memory for the rotated x: dimensions in the order that x has in memory, and a last stride of 1."""
    result = torch.empty_like(x) if x.stride(-1) == 1 else x
    return result if result.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, cos, sin, positions, ctx.interleaved, ctx.reverse, ctx.heads_first, ctx.rotary_dim = inputs
    ctx.save_for_backward(cos, sin, positions)


def _reverse_settings(ctx: Any) -> tuple[Any, ...]:
    return *ctx.saved_tensors, ctx.interleaved, not ctx.reverse, ctx.heads_first, ctx.rotary_dim


_TABLES = "Tensor cos, Tensor sin, Tensor? positions, bool interleaved"
_rotary: Operator = Operator(
    f"rotary(Tensor x, {_TABLES}, bool reverse, bool heads_first, int rotary_dim) -> Tensor",
    backends={"nvidia": "rotary.triton:forward"},
    reference=lambda x, *rest: empty_result(x).copy_(rotate_reference(x, *rest)),
    fake=empty_result,
    why_not=lambda x, cos, sin, positions, *rest: _why_not_tensors([x], cos, sin, positions),
    setup_context=_setup_context,
    backward=lambda ctx, gradient: (_rotary(gradient, *_reverse_settings(ctx)), *[None] * 7),
)
_rotary_pair: Operator = Operator(
    f"rotary_pair(Tensor q, Tensor k, {_TABLES}, bool reverse, bool heads_first, int rotary_dim) -> (Tensor, Tensor)",
    backends={"nvidia": "rotary.triton:forward_pair"},
    reference=lambda q, k, *rest: (
        empty_result(q).copy_(rotate_reference(q, *rest)),
        empty_result(k).copy_(rotate_reference(k, *rest)),
    ),
    fake=lambda q, k, *rest: (empty_result(q), empty_result(k)),
    why_not=lambda q, k, cos, sin, positions, *rest: _why_not_tensors([q, k], cos, sin, positions),
    setup_context=_setup_context,
    backward=lambda ctx, *gradients: (*_rotary_pair(*gradients, *_reverse_settings(ctx)), *[None] * 7),
)
_rotary_in_place = Operator(
    f"rotary_(Tensor(a!)[] tensors, {_TABLES}, bool heads_first, int rotary_dim) -> ()",
    backends={"nvidia": "rotary.triton:in_place"},
    reference=_rotate_in_place_reference,
    fake=lambda *args: None,
    why_not=_why_not_in_place,
)


def check_arguments(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None,
    inplace: bool, seq_dim: int, rotary_dim: int | None,
) -> tuple[bool, int]:  # fmt: skip
    """Whether heads come before the sequence, and how many numbers of a head rotate; raises `UsageError`."""
    x = tensors[0]
    if any(tensor.dim() not in (3, 4) or tensor.dim() != x.dim() for tensor in tensors):
        raise UsageError(f"rotary takes [batch, seq, heads, head_dim], without batch too, and not {_shapes(*tensors)}.")
    dimension = seq_dim - x.dim() if seq_dim >= 0 else seq_dim
    if dimension not in (-3, -2):
        raise UsageError(f"seq_dim is the third or the second from the end, -3 or -2, and not {seq_dim}.")
    batch, length, head_dim = x.shape[0] if x.dim() == 4 else 1, x.shape[dimension], x.shape[-1]
    for tensor in tensors[1:]:
        if tensor.shape[-1] != head_dim or tensor.shape[dimension] != length or tensor.shape[:-3] != x.shape[:-3]:
            raise UsageError(f"q and k may differ only in their number of heads, and these are {_shapes(*tensors)}.")
    width = cos.shape[-1] if cos.dim() else 0
    if rotary_dim is None:
        rotary_dim = head_dim if width == head_dim else 2 * width
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim or width not in (rotary_dim, rotary_dim // 2):
        raise UsageError(
            f"cos and sin have rotary_dim or half as many columns, and rotary_dim is even and at most head_dim: these"
            f" have {width}, rotary_dim is {rotary_dim}, and head_dim {head_dim}."
        )
    if cos.shape != sin.shape or cos.dim() not in (2, 3):
        raise UsageError(f"cos and sin are [seq, columns] or [batch, seq, columns], and not {_shapes(cos, sin)}.")
    if positions is None:
        if cos.shape[-2] < length or (cos.dim() == 3 and cos.shape[0] not in (1, batch)):
            raise UsageError(f"cos and sin have the shape {_shapes(cos)}, too little for {batch} x {length} tokens.")
    else:
        if cos.dim() != 2:
            raise UsageError(f"With positions, cos and sin are [rows, columns], and not {_shapes(cos)}.")
        if (
            positions.dim() not in (1, 2)
            or positions.shape[-1] != length
            or positions.shape[:-1] not in ((), (1,), (batch,))
        ):
            raise UsageError(f"positions are [seq] or [batch, seq], and not {_shapes(positions)}, for {_shapes(x)}.")
        if positions.dtype not in (torch.int32, torch.int64):
            raise UsageError(f"positions are int32 or int64, and not {positions.dtype}.")
    if inplace and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            "rotary with inplace=True records no gradient. Call it under torch.no_grad(), or without inplace."
        )
    return dimension == -2, rotary_dim


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(tensor.shape)) for tensor in tensors)


def _rotary_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None,
    inplace: bool = False, seq_dim: int = -3, rotary_dim: int | None = None,
) -> Tensor:  # fmt: skip
    heads_first, size = check_arguments([x], cos, sin, positions, inplace, seq_dim, rotary_dim)
    result = rotate_reference(x, cos, sin, positions, interleaved, False, heads_first, size)
    return x.copy_(result) if inplace else result


def _rotary_why_not(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None,
    inplace: bool = False, seq_dim: int = -3, rotary_dim: int | None = None,
) -> str | None:  # fmt: skip
    check_arguments([x], cos, sin, positions, inplace, seq_dim, rotary_dim)
    return (_why_not_in_place if inplace else _why_not_tensors)([x], cos, sin, positions)


@fused(reference=_rotary_reference, why_not=_rotary_why_not)
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None,
    inplace: bool = False, seq_dim: int = -3, rotary_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotates each pair of numbers (a, b) of a head to (a cos - b sin, b cos + a sin).

    Args:
        x: (batch, seq, heads, head_dim), or (batch, heads, seq, head_dim) with `seq_dim=-2`; both also without batch.
            float32, bfloat16 or float16, with any strides: a slice of a packed tensor is not copied, unless its last
            stride is not 1. The dimensions of the result have the same order in memory as those of x.
        cos, sin: (seq, pairs), or (seq, rotary_dim) with each angle twice; also with a batch in front. Any of these
            dtypes. They get no gradients: if they require one, plain torch runs.
        interleaved: Whether the two numbers of a pair are neighbors. Otherwise one is in the first half of the head and
            the other at the same place in the second half.
        positions: (seq,) or (batch, seq), the row of cos and sin for each token, int32 or int64. By default tokens use
            the rows in order. The result is NaN for positions outside of the table; the kernel raises no error.
        inplace: Overwrites x and returns it. Only where no gradient is recorded.
        seq_dim: The dimension of the sequence: -3 or -2, or the same counted from the front.
        rotary_dim: How many numbers of each head are rotated, from the first; the others are copied. By default
            head_dim if cos has as many columns, and otherwise two for each column. Required if cos has rotary_dim
            columns and rotary_dim is less than head_dim.
    """
    heads_first, size = check_arguments([x], cos, sin, positions, inplace, seq_dim, rotary_dim)
    if inplace:
        _rotary_in_place([x], cos, sin, positions, interleaved, heads_first, size)
        return x
    return _rotary(x, cos, sin, positions, interleaved, False, heads_first, size)  # type: ignore[no-any-return]


def _rotary_pair_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None,
    inplace: bool = False, seq_dim: int = -3, rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads_first, size = check_arguments([q, k], cos, sin, positions, inplace, seq_dim, rotary_dim)
    settings = (cos, sin, positions, interleaved, False, heads_first, size)
    results = rotate_reference(q, *settings), rotate_reference(k, *settings)
    return (q.copy_(results[0]), k.copy_(results[1])) if inplace else results


def _rotary_pair_why_not(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None,
    inplace: bool = False, seq_dim: int = -3, rotary_dim: int | None = None,
) -> str | None:  # fmt: skip
    check_arguments([q, k], cos, sin, positions, inplace, seq_dim, rotary_dim)
    return (_why_not_in_place if inplace else _why_not_tensors)([q, k], cos, sin, positions)


@fused(reference=_rotary_pair_reference, why_not=_rotary_pair_why_not)
def rotary_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None,
    inplace: bool = False, seq_dim: int = -3, rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotates q and k in one launch, which reads cos and sin once for both.

    They may differ in their number of heads, and in their strides. The other arguments are those of `rotary`.
    """
    heads_first, size = check_arguments([q, k], cos, sin, positions, inplace, seq_dim, rotary_dim)
    if inplace:
        _rotary_in_place([q, k], cos, sin, positions, interleaved, heads_first, size)
        return q, k
    return _rotary_pair(q, k, cos, sin, positions, interleaved, False, heads_first, size)  # type: ignore[no-any-return]
