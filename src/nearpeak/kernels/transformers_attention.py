"""`register_transformers`: attention of this package for models of `transformers`, by its name.

kernels.register_transformers()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="nearpeak")
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.attention import attention, attention_packed
from nearpeak.kernels.operations.decode import MOST_NEW, decode_attention
from nearpeak.kernels.transformers_masks import Pattern, PatternMask, mask_of

NAME = "nearpeak"
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register_transformers(name: str = NAME) -> None:
    """Makes `attn_implementation="nearpeak"` known to `transformers`; more than once does no harm.

    Models hand their keys, masks and options to `attention`, or for a few new tokens without a mask and without
    gradients to `decode_attention`: causality, sliding windows, softcaps, sinks, dropout and heads that share keys as
    they are, padding as a mask of [batch, 1, 1, keys]. Patterns that neither knows, as of chunked attention or packed
    sequences without `cu_seq_lens_q`, are written out as masks. Where no kernel can run, on a CPU for one, plain torch
    computes the same, with all scores in memory.

    For versions of `transformers` that say to a mask where queries are, as 5.17 does; older ones raise an error here.
    Queries that see nothing, as those of padding, have a result of 0; with "eager" it is a mean of all values.
    """
    try:
        transformers = import_module("transformers")
        masking = import_module("transformers.masking_utils")
        attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
        if "q_offset" not in inspect.signature(masking.sdpa_mask).parameters:
            raise ImportError(f"masks of {transformers.__version__} do not know where queries are")
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"register_transformers needs transformers 5.17 or newer: {error}. Install it: pip install -U transformers"
        ) from None
    attentions.register(name, attention_forward)
    masks.register(name, partial(mask_of, masking))


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
    """What `transformers` calls for the attention of a layer.

    Args:
        module: The layer; `is_causal` of it counts where no mask says anything.
        query: [batch, heads, queries, dim].
        key: [batch, key heads, keys, dim].
        value: [batch, key heads, keys, value dim].
        attention_mask: What `mask_of` returned, or a mask of the user's own: booleans, or what is added to scores.
        sliding_window: How many keys a query sees, its own included. Used without a mask alone: a mask says it itself.
        s_aux: Sinks.
        position_bias: Added to scores.

    Returns the result as [batch, queries, heads, value dim], and None for the weights.
    """
    if rest.get("output_attentions"):
        raise UsageError("nearpeak's attention has no weights to return. Use attn_implementation='eager' for these.")
    if rest.get("cache") is not None:
        raise UsageError("nearpeak's attention has no continuous batching. Use attn_implementation='sdpa' for it.")
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings in float32 leave theirs
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or None,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
    }
    if all(rest.get(name) is not None for name in _PACKED) and _says_nothing(attention_mask):
        window = None if sliding_window is None else (sliding_window - 1, None)
        found = attention_packed(
            *(one.squeeze(0).transpose(0, 1) for one in (query, key, value)), *(rest[name] for name in _PACKED),
            causal=causal, window=window, dropout=dropout, **options,
        )  # fmt: skip
        return found.unsqueeze(0), None
    pattern, bias = _seen(attention_mask, query.shape[2], key.shape[2], causal, sliding_window)
    bias = _added(position_bias, bias)
    result: Tensor
    if bias is None and pattern.bottom_right and _is_decoding(pattern, query, key, value, dropout, options["sinks"]):
        lengths = torch.full((len(query),), key.shape[2], dtype=torch.int32, device=query.device)
        result = decode_attention(query, key, value, lengths, window=pattern.left, **options)  # type: ignore[assignment]
    else:
        result = attention(
            query, key, value, causal=pattern.causal, alignment="bottom right" if pattern.bottom_right else "top left",
            window=None if pattern.left is None else (pattern.left, None), bias=bias, dropout=dropout, **options,
        )  # fmt: skip
    return result.transpose(1, 2).contiguous(), None


def _says_nothing(mask: Tensor | None) -> bool:
    """Whether a mask says no more than the starts of packed sequences do."""
    return mask is None or (isinstance(mask, PatternMask) and mask.padding is None)


def _seen(
    mask: Tensor | None, queries: int, keys: int, causal: bool, sliding_window: int | None
) -> tuple[Pattern, Tensor | None]:
    """Which keys are seen: by a pattern, and by a mask beside it."""
    if isinstance(mask, PatternMask):
        if mask.pattern is not None:
            return mask.pattern, None if mask.padding is None else mask.padding[:, None, None]
        mask = mask.written()
    if mask is not None:
        return Pattern(causal=False), mask[..., :keys]
    left = None if sliding_window is None else sliding_window - 1
    if queries == 1:  # it is the last token
        return Pattern(causal=False, left=left), None
    return Pattern(causal=causal, left=left if causal else None, bottom_right=queries == keys), None


def _added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A bias and a mask, of booleans or of numbers, as one."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def _is_decoding(
    pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, dropout: float, sinks: Tensor | None
) -> bool:
    """Whether these are the last tokens of sequences, which nobody differentiates."""
    queries = query.shape[2]
    if queries > min(MOST_NEW, key.shape[2] - 1) or dropout or not (pattern.causal or queries == 1):
        return False
    tensors = (query, key, value, sinks)
    return not torch.is_grad_enabled() or not any(one is not None and one.requires_grad for one in tensors)
