"""`attention`, `attention_packed` and `scaled_dot_product_attention`: softmax(query @ key^T) @ value in one kernel.

Memory traffic: forward reads query, key and value and writes the result and one float32 per query and head; backward
reads these and the gradient of the result, and writes three gradients. Keys and values are read again for each block of
queries, mostly from the L2 cache. Nothing of size queries * keys is stored, except a bias that the caller passes, and
its gradient.

The kernels are in `triton` (portable) and `sm90` (Gluon, for Hopper), `backends` chooses between them, `tuning` has
their configurations, and `reference` is the same in plain torch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused
from nearpeak.kernels.attention.reference import (
    attention_backward,
    attention_forward,
    empty_token_major,
    to_token_major,
)
from nearpeak.kernels.pointwise import seed_tensor

_ALIGNMENTS = ("bottom right", "top left")


def operator_arguments(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, alignment: str = "bottom right",
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    bias: Tensor | None = None, slopes: Tensor | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the operator, of [batch, heads, tokens, dim]."""
    _check_tensors(query, key, value, "[batch, heads, tokens, dim]")
    if bias is not None:
        _check_bias(bias, (*query.shape[:3], key.shape[2]))
    options = _checked_options(query, query.shape[0], causal, alignment, window, scale, softcap, slopes, sinks, dropout)
    seed = seed_tensor(seed, query.device) if dropout else None
    return query, key, value, bias, slopes, sinks, seed, None, None, 0, 0, *options


def packed_operator_arguments(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int,
    longest_key: int, *, causal: bool = False, alignment: str = "bottom right",
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    slopes: Tensor | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The same of [tokens, heads, dim], as one batch."""
    if not query.dim() == key.dim() == value.dim() == 3:
        raise UsageError(f"attention_packed takes [tokens, heads, dim], and {_describe_shapes(query, key, value)}.")
    query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
    _check_tensors(query, key, value, "[tokens, heads, dim], shown as [1, heads, tokens, dim]")
    for starts in (query_starts, key_starts):
        if starts.dim() != 1 or not len(starts) or starts.dtype not in (torch.int32, torch.int64):
            raise UsageError(
                "Starts are int32 of [sequences + 1], from 0 to the number of tokens, and these are"
                f" {starts.dtype} of shape {list(starts.shape)}."
            )
    if len(query_starts) != len(key_starts):
        raise UsageError(f"There are {len(query_starts) - 1} sequences of queries, and {len(key_starts) - 1} of keys.")
    options = _checked_options(
        query, len(query_starts) - 1, causal, alignment, window, scale, softcap, slopes, sinks, dropout
    )
    if slopes is not None and slopes.dim() == 2:
        raise UsageError("attention_packed takes slopes of [heads], one for all sequences.")
    seed = seed_tensor(seed, query.device) if dropout else None
    tensors = (query, key, value, None, slopes, sinks, seed, query_starts, key_starts)
    return *tensors, longest_query, longest_key, *options


def _describe_shapes(*tensors: Tensor) -> str:
    return "these have the shapes " + ", ".join(str(list(one.shape)) for one in tensors)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, form: str) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise UsageError(f"attention takes query, key and value of {form}, and {_describe_shapes(query, key, value)}.")
    if not all(one.is_floating_point() for one in (query, key, value)):
        raise UsageError(f"attention is of floats, and these are {query.dtype}, {key.dtype} and {value.dtype}.")
    batches, heads, _, dim = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batches or key.shape[3] != dim:
        raise UsageError(
            f"query, key and value of {form} have one batch, queries the dim of keys, and values the heads and tokens"
            f" of keys; {_describe_shapes(query, key, value)}."
        )
    if not key.shape[1] or heads % key.shape[1]:
        raise UsageError(f"The {heads} heads of queries must be a multiple of the {key.shape[1]} heads of keys.")


def _check_bias(bias: Tensor, to: tuple[int, ...]) -> None:
    if bias.dtype != torch.bool and not bias.is_floating_point():
        raise UsageError(f"A bias is floats to add, or booleans, True where a key is seen; this is {bias.dtype}.")
    fits = bias.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(bias.shape), reversed(to), strict=False)
    )
    if not fits:
        raise UsageError(f"A bias must broadcast to the scores, {list(to)}; this has the shape {list(bias.shape)}.")


def _checked_options(
    query: Tensor, sequences: int, causal: bool, alignment: str, window: Any, scale: float | None,
    softcap: float | None, slopes: Tensor | None, sinks: Tensor | None, dropout: float,
) -> tuple[int, int, bool, float, float, float]:  # fmt: skip
    heads, dim = query.shape[1], query.shape[3]
    if alignment not in _ALIGNMENTS:
        raise UsageError(f"There is no alignment {alignment!r}. {did_you_mean(alignment, _ALIGNMENTS)}")
    if softcap is not None and not softcap > 0.0:
        raise UsageError(f"A softcap is above 0, and this is {softcap}.")
    if not 0.0 <= dropout <= 1.0:
        raise UsageError(f"The probability of dropout is from 0 to 1, and this is {dropout}.")
    if slopes is not None and tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise UsageError(f"Slopes are [{heads}] or [{sequences}, {heads}], and these are {list(slopes.shape)}.")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise UsageError(f"Sinks are [{heads}], one for each head, and these are {list(sinks.shape)}.")
    left, right = _window_sides(window)
    if scale is None:
        scale = dim**-0.5 if dim else 1.0
    return left, 0 if causal else right, alignment == "bottom right", float(scale), float(softcap or 0.0), dropout


def _window_sides(window: Any) -> tuple[int, int]:
    """Both sides of a window, -1 for one without a limit."""
    if window is None:
        return -1, -1
    if len(window) != 2 or any(side is not None and side < 0 for side in window):
        raise UsageError(f"A window is (left, right), each a number of keys or None, and this is {window!r}.")
    left, right = (-1 if side is None else int(side) for side in window)
    return left, right


MAX_HEAD_DIM = 256
"""Heads of more dimensions do not fit into a processor's registers and memory."""
_TENSOR_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? seed,"
    " Tensor? query_starts, Tensor? key_starts"
)
_OPTION_SCHEMA = (
    "int longest_query, int longest_key, int left, int right, bool bottom_right, float scale, float softcap,"
    " float dropout"
)
_SLOPES_INPUT = 4


def operator_why_not(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str | None:
    """Why the kernels do not take the arguments of the operator."""
    if not query.dtype == key.dtype == value.dtype:
        return f"it takes one dtype, and query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    for size in (query.shape[-1], value.shape[-1]):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"it takes heads of 1 to {MAX_HEAD_DIM} dimensions, and these have {size}"
    return cannot_run(query, key, value, *(one for one in rest if isinstance(one, Tensor)))


def _backward_why_not(gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *rest: Any) -> Any:
    return operator_why_not(*rest) or cannot_run(gradient, lse_gradient, result, lse)


def _operator_reference(*args: Any) -> tuple[Tensor, Tensor]:
    result, lse = attention_forward(*args)
    return to_token_major(result), lse.contiguous()


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batches, heads, queries, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    result = empty_token_major(value, batches, heads, queries, value.shape[-1])
    return result, query.new_empty((batches, heads, queries), dtype=wide)


def _fake_backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, query: Tensor, key: Tensor,
    value: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    for_query, for_keys, for_bias, for_sinks = rest[-4:]

    def by_token(x: Tensor, wanted: bool) -> Tensor:
        return empty_token_major(x, *x.shape) if wanted else query.new_empty(0)

    return (
        by_token(query, for_query), by_token(key, for_keys), by_token(value, for_keys),
        bias.new_empty(bias.shape) if for_bias and bias is not None else query.new_empty(0),
        sinks.new_empty(sinks.shape) if for_sinks and sinks is not None else query.new_empty(0),
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)  # that of the logarithms is seldom wanted, and then not read


def _autograd_backward(ctx: Any, gradient: Tensor | None, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, result, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    if needed[_SLOPES_INPUT]:
        raise RuntimeError("nearpeak::attention has no gradient of slopes. Use nearpeak.kernels.attention, which has.")
    if gradient is None:
        gradient = torch.zeros_like(result)
    wanted = (needed[0], needed[1] or needed[2], needed[3], needed[5])
    found = _backward(gradient, lse_gradient, result, lse, *tensors, *ctx.options, *wanted)
    query, key, value, bias, sinks = found
    places = [query, key, value, bias, None, sinks]
    return (*(one if need else None for one, need in zip(places, needed, strict=False)), *[None] * 11)


_backward = Operator(
    f"attention_backward(Tensor gradient, Tensor? lse_gradient, Tensor result, Tensor lse, {_TENSOR_SCHEMA},"
    f" {_OPTION_SCHEMA}, bool for_query, bool for_keys, bool for_bias, bool for_sinks)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    backends={"nvidia": "attention.backends:backward"},
    reference=attention_backward,
    fake=_fake_backward,
    why_not=_backward_why_not,
)
_forward = Operator(
    f"attention({_TENSOR_SCHEMA}, {_OPTION_SCHEMA}) -> (Tensor, Tensor)",
    backends={"nvidia": "attention.backends:forward"},
    reference=_operator_reference,
    fake=_fake_forward,
    why_not=operator_why_not,
    setup_context=_setup_context,
    backward=_autograd_backward,
)

Alignment = Literal["bottom right", "top left"]
Window = tuple[int | None, int | None]
_NO_SLOPE_GRADIENT = "it has no gradient of slopes"


def _attention_why_not(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str | None:
    slopes = options.get("slopes")
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        return _NO_SLOPE_GRADIENT
    others = (options.get(name) for name in ("bias", "slopes", "sinks", "seed"))
    return operator_why_not(query, key, value, *others)


def _attention_reference(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    result, lse = attention_forward(*operator_arguments(query, key, value, **options))
    return (result, lse) if return_lse else result


@fused(reference=_attention_reference, why_not=_attention_why_not)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    alignment: Alignment = "bottom right",
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * query @ key^T) @ value for each head, without the scores in memory.

    >>> import torch, nearpeak.kernels as kernels
    >>> x = torch.tensor([[[[1.0], [3.0]]]])
    >>> kernels.attention(torch.zeros(1, 1, 2, 1), x, x, causal=True)
    tensor([[[[1.],
              [2.]]]])

    Args:
        query: [batch, heads, queries, dim], in any strides; one whose last stride is not 1 is copied first, and so are
            keys, values and upstream gradients of this kind.
        key: [batch, key heads, keys, dim]. The number of heads is a multiple of that of key heads: so many heads of
            queries in a row have the same keys, which are not repeated in memory.
        value: [batch, key heads, keys, value dim], which may differ from dim. Both are up to 256 for the kernel.
        causal: A query sees the keys up to its diagonal.
        alignment: Where that is. "bottom right": the last query is beside the last key, as when keys of earlier tokens
            are kept. "top left": the first is beside the first.
        window: How many keys left and right of the diagonal a query sees, besides the one on it; None for all.
        scale: Of products; 1 / sqrt(dim) where it is None.
        softcap: Scores become softcap * tanh(score / softcap).
        bias: Added to scores after that, in any strides of a tensor that broadcasts to [batch, heads, queries, keys].
            Or booleans, True where a key is seen. Floats may need a gradient: it is summed up in one fixed order, in a
            kernel that computes all scores once more.
        slopes: [heads] or [batch, heads]: slope * distance to the diagonal is taken off a score. With a gradient of
            slopes plain torch runs.
        sinks: [heads]: the score of one more key, which has no value. They may need a gradient.
        dropout: The share of weights that are set to 0, the others being scaled up.
        seed: What decides on these, a number or a tensor of one int64; None draws one from torch's generator. The mask
            depends on the places of batch, head, query and key alone.
        return_lse: Returns the logarithms of the sums of exponentials too, float32 of [batch, heads, queries], which
            have a gradient like the result.

    The result is [batch, heads, queries, value dim] in the dtype of the value, with tokens before heads in memory, so
    that `result.transpose(1, 2).flatten(2)` is no copy. A query that sees nothing has zeros, and -inf for a logarithm.

    Products are of the dtype of the tensors, weights rounded to it, and all sums in float32; float32 tensors are
    multiplied in full float32, which has no tensor cores and is slow. For the backward pass the inputs, the result and
    the logarithms are kept. Gradients are the same to the last bit in every run.
    """
    result, lse = _forward(
        *operator_arguments(
            query, key, value, causal=causal, alignment=alignment, window=window, scale=scale, softcap=softcap,
            bias=bias, slopes=slopes, sinks=sinks, dropout=dropout, seed=seed,
        )
    )  # fmt: skip
    return (result, lse) if return_lse else result


def _attention_packed_reference(*tensors: Any, return_lse: bool = False, **options: Any) -> Any:
    result, lse = attention_forward(*packed_operator_arguments(*tensors, **options))
    result, lse = result.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (result, lse) if return_lse else result


def _attention_packed_why_not(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int,
    longest_key: int, **options: Any,
) -> str | None:  # fmt: skip
    return _attention_why_not(query, key, value, **options) or operator_why_not(
        query, key, value, query_starts, key_starts
    )


@fused(reference=_attention_packed_reference, why_not=_attention_packed_why_not)
def attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    causal: bool = False,
    alignment: Alignment = "bottom right",
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_lse: bool = False,
) -> Any:
    """`attention` of sequences of different lengths, one after another without padding.

    Args:
        query: [tokens, heads, dim].
        key: [tokens of keys, key heads, dim].
        value: [tokens of keys, key heads, value dim].
        query_starts: Where each sequence begins among the queries, and where the last ends: int32, on the device.
        key_starts: The same of keys and values.
        longest_query: No sequence has more queries than this. Starts are read on the device alone, so that a CUDA graph
            can have other sequences in each replay.
        longest_key: No sequence has more keys.
        causal: This and all that follow are as in `attention`; slopes are [heads].

    The result is [tokens, heads, value dim], and the logarithms are [heads, tokens]. Tokens after the last sequence
    have zeros, and -inf for logarithms.
    """
    result, lse = _forward(
        *packed_operator_arguments(
            query, key, value, query_starts, key_starts, longest_query, longest_key, causal=causal,
            alignment=alignment, window=window, scale=scale, softcap=softcap, slopes=slopes, sinks=sinks,
            dropout=dropout, seed=seed,
        )
    )  # fmt: skip
    result, lse = result.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (result, lse) if return_lse else result


def _scaled_dot_product_why_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    if not 3 <= query.dim() <= 4 or not query.dim() == key.dim() == value.dim():
        return "it takes tensors of three or four dimensions"
    if is_causal and attn_mask is not None:
        return "it takes a mask or is_causal"
    if query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
        return "the shapes of query, key and value do not fit each other"
    heads, key_heads = (query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1)
    if heads != key_heads and (not enable_gqa or not key_heads or heads % key_heads):
        return f"it takes as many heads of queries as of keys without enable_gqa, and these have {heads}, {key_heads}"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return f"it takes a mask of booleans or of {query.dtype}"
    return operator_why_not(query, key, value, attn_mask)


def _torch_attention(*args: Any, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*args, **options)


@fused(reference=_torch_attention, why_not=_scaled_dot_product_why_not)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by `attention`, with the same arguments and meaning.

    A causal query sees keys from the top left. Masks are read by their strides: neither an expanded one nor a boolean
    one is copied. Which weights are dropped differs from torch, and so do strides of the result. What the kernel does
    not take is passed to torch.
    """
    flat = query.dim() == 3
    if flat:
        query, key, value = (one.unsqueeze(1) for one in (query, key, value))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    result: Tensor = attention(
        query, key, value, causal=is_causal, alignment="top left", scale=scale, bias=attn_mask, dropout=dropout_p
    )
    return result.squeeze(1) if flat else result


class Attention(torch.nn.Module):
    """`attention` with its options kept, and dropout in training alone: `module(query, key, value)`."""

    def __init__(
        self,
        *,
        causal: bool = False,
        alignment: Alignment = "bottom right",
        window: Window | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal, self.alignment, self.window = causal, alignment, window
        self.scale, self.softcap, self.dropout = scale, softcap, dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = attention(
            query, key, value, causal=self.causal, alignment=self.alignment, window=self.window, scale=self.scale,
            softcap=self.softcap, bias=bias, dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return result

    def extra_repr(self) -> str:
        names = ("causal", "alignment", "window", "scale", "softcap", "dropout")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
