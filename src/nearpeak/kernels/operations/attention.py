"""`attention`, `attention_packed` and `scaled_dot_product_attention`: softmax(query @ key^T) @ value in one kernel.

Bytes that must be moved: forward reads query, key and value and writes the result and one float32 for each query and
head; backward reads these and the gradient of the result, and writes three gradients. Keys and values are read again
for each block of queries, mostly from a cache. Nothing that grows with queries times keys is in memory, but for a bias
that somebody gave, and its gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.kernels.operations.attention_arguments import arguments, packed_arguments
from nearpeak.kernels.operations.attention_operators import attend, refuses
from nearpeak.kernels.operations.attention_reference import plain
from nearpeak.kernels.policy import fused

Alignment = Literal["bottom right", "top left"]
Window = tuple[int | None, int | None]
_SLOPES_NEED_ONE = "it has no gradient of slopes"


def _why_not(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str | None:
    slopes = options.get("slopes")
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        return _SLOPES_NEED_ONE
    others = (options.get(name) for name in ("bias", "slopes", "sinks", "seed"))
    return refuses(query, key, value, *others)


def reference(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    result, lse = plain(*arguments(query, key, value, **options))
    return (result, lse) if return_lse else result


@fused(reference=reference, why_not=_why_not)
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
    result, lse = attend(
        *arguments(
            query, key, value, causal=causal, alignment=alignment, window=window, scale=scale, softcap=softcap,
            bias=bias, slopes=slopes, sinks=sinks, dropout=dropout, seed=seed,
        )
    )  # fmt: skip
    return (result, lse) if return_lse else result


def packed_reference(*tensors: Any, return_lse: bool = False, **options: Any) -> Any:
    result, lse = plain(*packed_arguments(*tensors, **options))
    result, lse = result.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (result, lse) if return_lse else result


def _packed_why_not(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int,
    longest_key: int, **options: Any,
) -> str | None:  # fmt: skip
    return _why_not(query, key, value, **options) or refuses(query, key, value, query_starts, key_starts)


@fused(reference=packed_reference, why_not=_packed_why_not)
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
    result, lse = attend(
        *packed_arguments(
            query, key, value, query_starts, key_starts, longest_query, longest_key, causal=causal,
            alignment=alignment, window=window, scale=scale, softcap=softcap, slopes=slopes, sinks=sinks,
            dropout=dropout, seed=seed,
        )
    )  # fmt: skip
    result, lse = result.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (result, lse) if return_lse else result


def _torch_why_not(
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
    return refuses(query, key, value, attn_mask)


def torch_reference(*args: Any, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*args, **options)


@fused(reference=torch_reference, why_not=_torch_why_not)
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
