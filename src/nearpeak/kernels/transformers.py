"""`register_transformers`: attention of nearpeak as an attention implementation of Hugging Face `transformers`.

    kernels.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="nearpeak")

`transformers` asks an attention implementation for the mask of each pattern once per forward pass and passes it to all
layers. A boolean mask of [batch, 1, queries, keys] is as large as the scores of one head. The kernels compute
causality, a window to the left and padding themselves, so `make_mask` returns a `PatternMask`, which describes the mask
and is materialized only when another op reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nearpeak.errors import UsageError
from nearpeak.kernels.attention import attention, attention_packed
from nearpeak.kernels.decode import MAX_NEW_TOKENS, decode_attention

NAME = "nearpeak"
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register_transformers(name: str = NAME) -> None:
    """Registers `attn_implementation="nearpeak"` with `transformers`. Calling it again has no effect.

    Models call `attention`, or `decode_attention` for a few new tokens without a mask and without gradients. Causal
    masks, sliding windows, softcaps, sinks, dropout and grouped-query attention are passed on, and padding becomes a
    mask of [batch, 1, 1, keys]. Other patterns, such as chunked attention or packed sequences without `cu_seq_lens_q`,
    become full masks. If no kernel can run, for example on a CPU, plain torch computes the same with all scores in
    memory.

    Requires transformers 5.17 or newer, which passes the position of queries to masks. Queries that see no key, such as
    padding, have a result of 0; with "eager" it is the mean of all values.
    """
    try:
        transformers = import_module("transformers")
        masking = import_module("transformers.masking_utils")
        attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
        if "q_offset" not in inspect.signature(masking.sdpa_mask).parameters:
            raise ImportError(f"masks of {transformers.__version__} do not know the position of queries")
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"register_transformers needs transformers 5.17 or newer: {error}. Install it: pip install -U transformers"
        ) from None
    attentions.register(name, attention_forward)
    masks.register(name, partial(make_mask, masking))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function that `transformers` calls for each layer.

    Args:
        module: The layer; its `is_causal` applies if there is no mask.
        query: [batch, heads, queries, dim].
        key: [batch, key heads, keys, dim].
        value: [batch, key heads, keys, value dim].
        attention_mask: The return value of `make_mask`, or a mask of the user: booleans, or a bias.
        sliding_window: The number of keys that a query sees, including its own. Ignored if there is a mask.
        s_aux: Sinks.
        position_bias: Added to scores.

    Returns the result as [batch, queries, heads, value dim], and None for the weights.
    """
    if rest.get("output_attentions"):
        raise UsageError("nearpeak's attention has no weights to return. Use attn_implementation='eager'.")
    if rest.get("cache") is not None:
        raise UsageError("nearpeak's attention has no continuous batching. Use attn_implementation='sdpa'.")
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings in float32 return float32
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or None,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
    }
    if all(rest.get(name) is not None for name in _PACKED) and _is_empty_mask(attention_mask):
        window = None if sliding_window is None else (sliding_window - 1, None)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        starts_and_lengths: Any = [rest[name] for name in _PACKED]
        result = attention_packed(
            query, key, value, *starts_and_lengths, causal=causal, window=window, dropout=dropout, **options
        )
        return result.unsqueeze(0), None
    pattern, bias = _pattern_and_bias(attention_mask, query.shape[2], key.shape[2], causal, sliding_window)
    bias = _combine_bias_and_mask(position_bias, bias)
    if bias is None and pattern.bottom_right and _is_decoding(pattern, query, key, value, dropout, options["sinks"]):
        lengths = torch.full((len(query),), key.shape[2], dtype=torch.int32, device=query.device)
        result = decode_attention(query, key, value, lengths, window=pattern.left, **options)
    else:
        result = attention(
            query, key, value, causal=pattern.causal, alignment="bottom right" if pattern.bottom_right else "top left",
            window=None if pattern.left is None else (pattern.left, None), bias=bias, dropout=dropout, **options,
        )  # fmt: skip
    return result.transpose(1, 2).contiguous(), None


def _is_empty_mask(mask: Tensor | None) -> bool:
    """Whether a mask adds nothing to the starts of packed sequences."""
    return mask is None or (isinstance(mask, PatternMask) and mask.padding is None)


def _pattern_and_bias(
    mask: Tensor | None, queries: int, keys: int, causal: bool, sliding_window: int | None
) -> tuple[Pattern, Tensor | None]:
    """The visible keys, as a pattern and a mask in addition to it."""
    if isinstance(mask, PatternMask):
        if mask.pattern is not None:
            return mask.pattern, None if mask.padding is None else mask.padding[:, None, None]
        mask = mask.materialize()
    if mask is not None:
        return Pattern(causal=False), mask[..., :keys]
    left = None if sliding_window is None else sliding_window - 1
    if queries == 1:  # it is the last token
        return Pattern(causal=False, left=left), None
    return Pattern(causal=causal, left=left if causal else None, bottom_right=queries == keys), None


def _combine_bias_and_mask(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A bias and a mask, of booleans or floats, as one."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def _is_decoding(
    pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, dropout: float, sinks: Tensor | None
) -> bool:
    """Whether these are the last tokens of sequences, and no gradient is needed."""
    queries = query.shape[2]
    if queries > min(MAX_NEW_TOKENS, key.shape[2] - 1) or dropout or not (pattern.causal or queries == 1):
        return False
    tensors = (query, key, value, sinks)
    return not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The keys that a query sees, by its position."""

    causal: bool
    left: int | None = None
    """The most keys before its own; None for all."""
    bottom_right: bool = True
    """Whether the last query is aligned with the last key, or the first with the first."""


class PatternMask(Tensor):
    """A mask of [batch, 1, queries, keys], True for visible keys, that is materialized when an op of torch reads it.

    Args:
        make: Returns the mask as a plain tensor.
        pattern: The mask without padding; None if only `make` knows it.
        padding: [batch, keys], False for padding keys; None if there are none.
    """

    make: Callable[[], Tensor]
    pattern: Pattern | None
    padding: Tensor | None
    _materialized: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, make: Callable[[], Tensor], pattern: Pattern | None,
        padding: Tensor | None,
    ) -> PatternMask:  # fmt: skip
        mask: PatternMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.make, mask.pattern, mask.padding, mask._materialized = make, pattern, padding, None
        return mask

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def materialize(self) -> Tensor:
        """The mask as a plain tensor, the same one for all layers."""
        if self._materialized is None:
            self._materialized = self.make()
        return self._materialized

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def as_plain(x: Any) -> Any:
            return x.materialize() if isinstance(x, PatternMask) else x

        args, kwargs = tree_map(as_plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PatternMask({tuple(self.shape)}, {self.pattern}, padding={self.padding is not None})"


def make_mask(masking: Any, *, batch_size: int, q_length: int, kv_length: int, **rest: Any) -> Tensor | None:
    """The mask function of the attention implementation, with the arguments and return values of `sdpa_mask`.

    None means a causal mask aligned at the top left, or no mask if the module is not causal, or for one query.
    `masking` is the module `transformers.masking_utils`.
    """
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    padding, first_query = rest.get("attention_mask"), rest.get("q_offset", 0)
    # only the device knows the position in a cache of fixed size; the mask of one query is small
    if _is_opaque(padding) or _is_opaque(first_query) or (q_length == 1 and isinstance(first_query, Tensor)):
        return masking.sdpa_mask(**sizes, **rest)  # type: ignore[no-any-return]
    offset = int(rest.get("kv_offset", 0))
    if padding is not None:
        padding = masking.prepare_padding_mask(padding, kv_length, offset)[:, offset : offset + kv_length]
        padding = None if bool(padding.all()) else padding
    pattern = _pattern_of_function(masking, rest.get("mask_function"), q_length, kv_length, int(first_query) - offset)
    if pattern is not None and padding is None:
        has_no_window = pattern.left is None or pattern.left >= kv_length - 1
        is_full = not pattern.causal and rest.get("allow_is_bidirectional_skip", False)
        is_plain = q_length in (1, kv_length) and pattern.bottom_right and rest.get("allow_is_causal_skip", True)
        if is_full or (pattern.causal and is_plain and has_no_window):
            return None
    elif q_length == 1:
        return masking.sdpa_mask(**sizes, **rest)  # type: ignore[no-any-return]
    options = {**rest, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    device = torch.device(rest.get("device", "cpu"))
    shape = (batch_size, 1, q_length, kv_length)
    return PatternMask(shape, device, partial(masking.sdpa_mask, **sizes, **options), pattern, padding)


def _is_opaque(x: Any) -> bool:
    """Whether the values of a tensor must not be read: code is compiled, or the tensor is a fake one."""
    return torch.compiler.is_compiling() or (isinstance(x, Tensor) and type(x) is not Tensor)


def _pattern_of_function(masking: Any, function: Any, queries: int, keys: int, shift: int) -> Pattern | None:
    """The pattern of a mask function of `transformers`; `shift` is the position of the first query among the keys."""
    if function is masking.bidirectional_mask_function:
        return Pattern(causal=False)
    left = None
    if function is not masking.causal_mask_function and function is not None:
        window = _window_of_function(masking, function)
        if window is None:
            return None
        left = window - 1
    if shift == keys - queries:
        return Pattern(causal=True, left=left)
    return Pattern(causal=True, left=left, bottom_right=False) if shift == 0 else None


def _window_of_function(masking: Any, function: Any) -> int | None:
    """The window of a causal mask function with a sliding window; None for any other function.

    These are closures, which are recognized by their code.
    """
    example = masking.sliding_window_causal_mask_function(1)
    parts, example_parts = _closure_functions(function), _closure_functions(example)
    if not example_parts or len(parts) != len(example_parts) or _code_of(function) is not _code_of(example):
        return None
    if any(_code_of(part) is not _code_of(expected) for part, expected in zip(parts, example_parts, strict=True)):
        return None
    contents = [cell.cell_contents for part in parts for cell in part.__closure__ or ()]
    return contents[0] if len(contents) == 1 and isinstance(contents[0], int) and contents[0] > 0 else None


def _closure_functions(function: Any) -> tuple[Any, ...]:
    """The functions that a mask function combines."""
    contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return contents[0] if len(contents) == 1 and isinstance(contents[0], tuple) else ()


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", function)
