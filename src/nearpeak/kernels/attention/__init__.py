"""`attention`, `attention_packed`, `attention_fp8` and `scaled_dot_product_attention`: softmax(query @ key^T) @ value.

Memory traffic: forward reads query, key and value and writes the result and one float32 per query and head; backward
reads these and the gradient of the result, and writes three gradients. Keys and values are read again for each block of
queries, mostly from the L2 cache. Nothing of size queries * keys is stored, except a bias that the caller passes, and
its gradient.

The kernels are in `triton` (portable) and `sm90` (Gluon, for Hopper), `library` calls those of torch, `backends`
chooses between them, `tuning` has configurations, and `reference` is the same in plain torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused, too_old
from nearpeak.kernels.attention.reference import (
    as_token_major,
    attention_backward,
    attention_forward,
    attention_fp8_forward,
    empty_token_major,
    to_token_major,
)
from nearpeak.kernels.pointwise import seed_tensor

Alignment = Literal["bottom right", "top left"]
_ALIGNMENTS = get_args(Alignment)
Window = tuple[int | None, int | None]
MAX_HEAD_DIM = 256
"""Tiles of larger heads do not fit into the registers and the shared memory of a multiprocessor."""
_TENSOR_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? seed,"
    " Tensor? query_starts, Tensor? key_starts"
)
_OPTION_SCHEMA = (
    "int longest_query, int longest_key, int left, int right, bool bottom_right, float scale, float softcap,"
    " float dropout"
)
_SLOPES_INPUT = 4


def operator_arguments(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, alignment: str = "bottom right",
    window: Window | None = None, scale: float | None = None, softcap: float | None = None,
    bias: Tensor | None = None, slopes: Tensor | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Checks the arguments of `attention`, and returns those of the operator."""
    _check_tensors(query, key, value, "[batch, heads, tokens, dim]")
    if bias is not None:
        _check_bias(bias, (*query.shape[:3], key.shape[2]))
    options = _checked_options(query, query.shape[0], causal, alignment, window, scale, softcap, slopes, sinks, dropout)
    seed = seed_tensor(seed, query.device) if dropout else None
    return query, key, value, bias, slopes, sinks, seed, None, None, 0, 0, *options


def packed_operator_arguments(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int,
    longest_key: int, *, causal: bool = False, alignment: str = "bottom right",
    window: Window | None = None, scale: float | None = None, softcap: float | None = None,
    slopes: Tensor | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The same for `attention_packed`, with [tokens, heads, dim] as one batch."""
    if not query.dim() == key.dim() == value.dim() == 3:
        raise UsageError(f"attention_packed takes [tokens, heads, dim], and {_describe_shapes(query, key, value)}.")
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    _check_tensors(query, key, value, "[tokens, heads, dim], shown as [1, heads, tokens, dim]")
    for starts in (query_starts, key_starts):
        if starts.dim() != 1 or not len(starts) or starts.dtype not in (torch.int32, torch.int64):
            raise UsageError(
                "Starts are int32 of [sequences + 1], from 0 to the number of tokens, and these are"
                f" {starts.dtype} of shape {list(starts.shape)}."
            )
    if len(query_starts) != len(key_starts):
        raise UsageError(
            f"query_starts is for {len(query_starts) - 1} sequences, and key_starts for {len(key_starts) - 1}."
        )
    options = _checked_options(
        query, len(query_starts) - 1, causal, alignment, window, scale, softcap, slopes, sinks, dropout
    )
    if slopes is not None and slopes.dim() == 2:
        raise UsageError("attention_packed takes slopes of [heads], one for all sequences.")
    seed = seed_tensor(seed, query.device) if dropout else None
    tensors = (query, key, value, None, slopes, sinks, seed, query_starts, key_starts)
    return *tensors, longest_query, longest_key, *options


def _describe_shapes(*tensors: Tensor) -> str:
    return "these have the shapes " + ", ".join(str(list(x.shape)) for x in tensors)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, form: str) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise UsageError(f"attention takes query, key and value of {form}, and {_describe_shapes(query, key, value)}.")
    if not all(x.is_floating_point() for x in (query, key, value)):
        raise UsageError(f"attention takes floats, and these are {query.dtype}, {key.dtype} and {value.dtype}.")
    batches, heads, _, dim = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batches or key.shape[3] != dim:
        raise UsageError(
            f"query, key and value of {form} must have one batch, query the dim of key, and value the heads and tokens"
            f" of key; {_describe_shapes(query, key, value)}."
        )
    if not key.shape[1] or heads % key.shape[1]:
        raise UsageError(f"The {heads} heads of queries must be a multiple of the {key.shape[1]} heads of keys.")


def _check_bias(bias: Tensor, scores: tuple[int, ...]) -> None:
    if bias.dtype != torch.bool and not bias.is_floating_point():
        raise UsageError(f"A bias has floats to add, or booleans, True for visible keys; this is {bias.dtype}.")
    fits = bias.dim() <= 4 and all(
        size in (1, full) for size, full in zip(reversed(bias.shape), reversed(scores), strict=False)
    )
    if not fits:
        raise UsageError(f"A bias must broadcast to the scores, {list(scores)}; this has the shape {list(bias.shape)}.")


def _checked_options(
    query: Tensor, sequences: int, causal: bool, alignment: str, window: Any, scale: float | None,
    softcap: float | None, slopes: Tensor | None, sinks: Tensor | None, dropout: float,
) -> tuple[int, int, bool, float, float, float]:  # fmt: skip
    heads, dim = query.shape[1], query.shape[3]
    if alignment not in _ALIGNMENTS:
        raise UsageError(f"There is no alignment {alignment!r}. {did_you_mean(alignment, _ALIGNMENTS)}")
    if softcap is not None and not softcap > 0.0:
        raise UsageError(f"A softcap must be above 0, and this is {softcap}.")
    if not 0.0 <= dropout <= 1.0:
        raise UsageError(f"The probability of dropout must be from 0 to 1, and this is {dropout}.")
    if slopes is not None and tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise UsageError(f"Slopes are [{heads}] or [{sequences}, {heads}], and these are {list(slopes.shape)}.")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise UsageError(f"Sinks are [{heads}], one for each head, and these are {list(sinks.shape)}.")
    left, right = _window_sides(window)
    if scale is None:
        scale = dim**-0.5 if dim else 1.0
    return left, 0 if causal else right, alignment == "bottom right", float(scale), float(softcap or 0.0), dropout


def _window_sides(window: Any) -> tuple[int, int]:
    """Both sides of a window, -1 for a side without a limit."""
    if window is None:
        return -1, -1
    if len(window) != 2 or any(side is not None and side < 0 for side in window):
        raise UsageError(f"A window is (left, right), each a number of keys or None, and this is {window!r}.")
    left, right = (-1 if side is None else int(side) for side in window)
    return left, right


def operator_why_not(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str | None:
    """Why the kernels do not support the arguments of the operator, or None."""
    if not query.dtype == key.dtype == value.dtype:
        return f"it takes one dtype, and query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    for size in (query.shape[-1], value.shape[-1]):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"it takes heads of 1 to {MAX_HEAD_DIM} dimensions, and these have {size}"
    return cannot_run(query, key, value, *(x for x in rest if isinstance(x, Tensor)))


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

    def token_major(x: Tensor, wanted: bool) -> Tensor:
        return empty_token_major(x, *x.shape) if wanted else query.new_empty(0)

    return (
        token_major(query, for_query), token_major(key, for_keys), token_major(value, for_keys),
        bias.new_empty(bias.shape) if for_bias and bias is not None else query.new_empty(0),
        sinks.new_empty(sinks.shape) if for_sinks and sinks is not None else query.new_empty(0),
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)  # the gradient of the lse is mostly None, and then not read


def _autograd_backward(ctx: Any, gradient: Tensor | None, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, result, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    if needed[_SLOPES_INPUT]:
        raise RuntimeError("nearpeak::attention has no gradient of slopes. Use nearpeak.kernels.attention instead.")
    if gradient is None:
        gradient = torch.zeros_like(result)
    wanted = (needed[0], needed[1] or needed[2], needed[3], needed[5])
    gradients = _backward(gradient, lse_gradient, result, lse, *tensors, *ctx.options, *wanted)
    query, key, value, bias, sinks = gradients
    by_input = [query, key, value, bias, None, sinks]
    return (*(x if need else None for x, need in zip(by_input, needed, strict=False)), *[None] * 11)


_backward = Operator(
    f"attention_backward(Tensor gradient, Tensor? lse_gradient, Tensor result, Tensor lse, {_TENSOR_SCHEMA},"
    f" {_OPTION_SCHEMA}, bool for_query, bool for_keys, bool for_bias, bool for_sinks)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    backends={"nvidia": "attention.backends:backward"},
    reference=attention_backward,
    fake=_fake_backward,
    why_not=_backward_why_not,
    finish=lambda *gradients: (
        tuple(as_token_major(x) if x.dim() == 4 and x.numel() else x for x in gradients[:3]) + gradients[3:]
    ),
)
_forward = Operator(
    f"attention({_TENSOR_SCHEMA}, {_OPTION_SCHEMA}) -> (Tensor, Tensor)",
    backends={"nvidia": "attention.backends:forward"},
    reference=_operator_reference,
    fake=_fake_forward,
    why_not=operator_why_not,
    finish=lambda result, lse: (as_token_major(result), lse),
    setup_context=_setup_context,
    backward=_autograd_backward,
)


def _attention_why_not(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str | None:
    slopes = options.get("slopes")
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        return "it has no gradient of slopes"
    others = (options.get(name) for name in ("bias", "slopes", "sinks", "seed"))
    return operator_why_not(query, key, value, *others)


def _attention_reference(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    result, lse = attention_forward(*operator_arguments(query, key, value, **options))
    return (result, lse) if return_lse else result


@fused(reference=_attention_reference, why_not=_attention_why_not, has_choice=True)
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
    """softmax(scale * query @ key^T) @ value for each head, without storing the scores.

    >>> import torch, nearpeak.kernels as kernels
    >>> x = torch.tensor([[[[1.0], [3.0]]]])
    >>> kernels.attention(torch.zeros(1, 1, 2, 1), x, x, causal=True)
    tensor([[[[1.],
              [2.]]]])

    Args:
        query: [batch, heads, queries, dim], with any strides. Tensors whose last stride is not 1 are copied first.
        key: [batch, key heads, keys, dim]. The number of heads is a multiple of the number of key heads: consecutive
            heads of queries share a head of keys (grouped-query attention), which is not repeated in memory.
        value: [batch, key heads, keys, value dim], which may differ from dim. The kernel supports up to 256 of both.
        causal: A query sees the keys up to its diagonal.
        alignment: The position of the diagonal. "bottom right": the last query is aligned with the last key, as with a
            cache of earlier keys. "top left": the first query is aligned with the first key.
        window: The number of keys left and right of the diagonal that a query sees, besides the one on it; None for
            all.
        scale: The factor of the products; 1 / sqrt(dim) by default.
        softcap: Scores become softcap * tanh(score / softcap).
        bias: Added to the scores after that: a tensor that broadcasts to [batch, heads, queries, keys], with any
            strides. Or booleans, True for visible keys. Floats may require a gradient, which takes a kernel that
            recomputes all scores.
        slopes: [heads] or [batch, heads]: slope * distance to the diagonal is subtracted from a score (ALiBi). If
            slopes require a gradient, plain torch runs.
        sinks: [heads]: the score of one more key without a value. They may require a gradient.
        dropout: The probability of setting a weight to 0; the others are scaled up.
        seed: The seed of the dropout, a number or a tensor of one int64; None draws one from torch's generator. The
            mask depends on the seed and on the indices of batch, head, query and key only.
        return_lse: Also returns the log-sum-exp of the scores, float32 of [batch, heads, queries], which is
            differentiable like the result.

    The result is [batch, heads, queries, value dim] in the dtype of the value. Tokens come before heads in memory, so
    that `result.transpose(1, 2).flatten(2)` does not copy, unless they do not in the query and a kernel of torch runs.
    A query that sees no key has zeros, and -inf as log-sum-exp.

    Products are in the dtype of the tensors, to which weights are rounded, and all sums in float32. float32 is
    multiplied in full precision, without tensor cores, and is slow. The backward pass saves the inputs, the result and
    the log-sum-exp.

    Which backend runs is chosen by size, see `supports`: this package's kernels, or cuDNN or FlashAttention-2 as torch
    has them. Gradients of torch's are not bitwise reproducible. They are always after
    `torch.use_deterministic_algorithms(True)`, and with `using(backend="gluon")` or "triton".
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


@fused(reference=_attention_packed_reference, why_not=_attention_packed_why_not, has_choice=True)
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
    """`attention` of sequences of different lengths, packed one after another without padding.

    Args:
        query: [tokens, heads, dim].
        key: [tokens of keys, key heads, dim].
        value: [tokens of keys, key heads, value dim].
        query_starts: The first query of each sequence, and the end of the last one: int32, on the device.
        key_starts: The same for keys and values.
        longest_query: An upper bound of the queries of a sequence. The host does not read the starts, so that a CUDA
            graph can be replayed with other sequences.
        longest_key: An upper bound of the keys of a sequence.
        causal: This and the following are as in `attention`; slopes are [heads].

    The result is [tokens, heads, value dim], and the log-sum-exp is [heads, tokens]. Tokens after the last sequence
    have zeros, and -inf as log-sum-exp.

    Which backend runs is chosen by size, as in `attention`: the portable kernels, or FlashAttention-2 as
    `torch.nn.attention.varlen` has it, whose gradients are not bitwise reproducible.
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


def _fp8_operator_why_not(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str | None:
    reason = operator_why_not(query, key, value) or too_old(query.device, (9, 0))
    if reason is not None:
        return reason
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, and this is {query.dtype}"
    dims = query.shape[-1], value.shape[-1]
    if dims not in ((64, 64), (128, 128)):
        return f"it takes heads of 64 or 128 dimensions, of keys as of values, and these have {dims[0]} and {dims[1]}"
    if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return None  # the rest is checked when it runs
    from nearpeak.kernels.attention.backends import fp8_why_not

    return fp8_why_not(query, key, value, *rest)


def _fp8_operator_reference(*args: Any) -> tuple[Tensor, Tensor]:
    result, lse = attention_fp8_forward(*args)
    return to_token_major(result), lse.contiguous()


_forward_fp8 = Operator(
    "attention_fp8(Tensor query, Tensor key, Tensor value, int right, bool bottom_right, float scale)"
    " -> (Tensor, Tensor)",
    backends={"nvidia": "attention.backends:forward_fp8"},
    reference=_fp8_operator_reference,
    fake=_fake_forward,
    why_not=_fp8_operator_why_not,
    finish=lambda result, lse: (as_token_major(result), lse),
)


def _fp8_arguments(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = False, alignment: str = "bottom right",
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Checks the arguments of `attention_fp8`, and returns those of its operator."""
    _check_tensors(query, key, value, "[batch, heads, tokens, dim]")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise UsageError("attention_fp8 has no gradients. Call it inside of torch.no_grad(), or use attention.")
    options = _checked_options(query, query.shape[0], causal, alignment, None, scale, None, None, None, 0.0)
    return query, key, value, *options[1:4]


def _attention_fp8_why_not(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Any
) -> str | None:
    return _fp8_operator_why_not(*_fp8_arguments(query, key, value, **options))


def _attention_fp8_reference(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Any
) -> Any:
    result, lse = attention_fp8_forward(*_fp8_arguments(query, key, value, **options))
    return (result, lse) if return_lse else result


@fused(reference=_attention_fp8_reference, why_not=_attention_fp8_why_not)
def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    alignment: Alignment = "bottom right",
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """`attention` with operands that are rounded to 8 bits, for inference: faster, and less exact.

    Query, key and value are quantized to float8_e4m3fn with one scale for each head, its largest magnitude over 448,
    and weights are rounded to 8 bits as well. Sums are in float32. For numbers of a normal distribution the result
    differs from that of 16 bits by 5 % of its norm; a head with outliers loses more, as one scale holds for all its
    tokens.

    The kernel is for Hopper, and heads of 64 and 128. Elsewhere plain torch computes attention of the quantized
    numbers. There are no gradients. Arguments are those of `attention`.
    """
    result, lse = _forward_fp8(*_fp8_arguments(query, key, value, causal, alignment, scale))
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
        return "the shapes of query, key and value do not match"
    heads, key_heads = (query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1)
    if heads != key_heads and (not enable_gqa or not key_heads or heads % key_heads):
        return f"without enable_gqa it takes as many heads of queries as of keys, and these have {heads}, {key_heads}"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return f"it takes a mask of booleans or of {query.dtype}"
    return operator_why_not(query, key, value, attn_mask)


def _torch_attention(*args: Any, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*args, **options)


@fused(reference=_torch_attention, why_not=_scaled_dot_product_why_not, has_choice=True)
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
    """A drop-in replacement of `torch.nn.functional.scaled_dot_product_attention`.

    A causal mask is aligned at the top left. Masks are read with their strides: neither an expanded nor a boolean mask
    is copied. The dropout mask differs from torch, and so do the strides of the result. Arguments that the kernel does
    not support are passed to torch.
    """
    flat = query.dim() == 3
    if flat:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    result: Tensor = attention(
        query, key, value, causal=is_causal, alignment="top left", scale=scale, bias=attn_mask, dropout=dropout_p
    )
    return result.squeeze(1) if flat else result


class Attention(torch.nn.Module):
    """`attention` as a module, with dropout only in training: `module(query, key, value)`."""

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
