"""The ways to attention that `benchmarks/kernels.py` knows, as functions of query, key and value.

"nearpeak" (the kernels that the public function picks), "portable" (its kernels in plain Triton, whatever it picks),
and those of torch: "cudnn" and "flash" (FlashAttention-2) of `scaled_dot_product_attention`, and "flex", FlexAttention
compiled, with a block mask where it is causal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kernel_cases
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from nearpeak import kernels
from nearpeak.kernels.operations.attention_arguments import arguments

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
COMPILED = ("nearpeak", "portable", "flex")
"""The ways that have to be compiled before they are timed."""


def attention_ways(causal: bool, tokens: int, device: str) -> dict[str, Way]:
    """All ways, by name; a way that does not take its inputs raises an error."""

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = kernels.attention(query, key, value, causal=causal)
        return found

    return {
        "nearpeak": own,
        "portable": lambda query, key, value: portable(query, key, value, causal),
        "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION, causal),
        "flash": by_torch(SDPBackend.FLASH_ATTENTION, causal),
        "flex": _flex(causal, tokens, device),
    }


def by_torch(backend: SDPBackend, causal: bool) -> Way:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a backend does not take it: the error comes by itself
            return scaled_dot_product_attention(query, key, value, is_causal=causal)

    return call


def _flex(causal: bool, tokens: int, device: str) -> Way:
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=kernel_cases.BACKEND)
    made: list[Any] = []

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if causal and not made:
            made.append(create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device))
        found: Tensor = compiled(query, key, value, block_mask=made[0] if made else None)
        return found

    return call


def portable(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attention by the kernels that run on every GPU, whatever the public function would pick here."""
    found: Tensor = _Portable.apply(query, key, value, causal)  # type: ignore[no-untyped-call]
    return found


class _Portable(torch.autograd.Function):
    """Their launchers, past what selects among several."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        from nearpeak.kernels.jit import attention_forward
        from nearpeak.kernels.jit.attention_launch import Problem

        ctx.problem = Problem(*arguments(query, key, value, causal=causal))
        result, lse = attention_forward.forward(ctx.problem)
        ctx.save_for_backward(result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from nearpeak.kernels.jit import attention_backward

        result, lse = ctx.saved_tensors
        by_query, by_key, by_value, _, _ = attention_backward.backward(
            ctx.problem, gradients[0], None, result, lse, ctx.needs_input_grad[0], ctx.needs_input_grad[1], False, False
        )
        return *(one if one.numel() else None for one in (by_query, by_key, by_value)), None
