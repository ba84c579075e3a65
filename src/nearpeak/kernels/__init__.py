"""Fused kernels: operations that move each byte once, as functions that are differentiable and safe to compile.

    from nearpeak import kernels
    y = kernels.softmax(x)                    # a Triton kernel on a GPU, plain torch elsewhere
    kernels.supports(kernels.softmax, x)      # which of them, and why
    with kernels.using("require"): ...        # raise rather than run plain torch

The functions are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearpeak.lazy import names

if TYPE_CHECKING:
    from nearpeak.kernels.operations.activations import bias_gelu, bias_relu_squared, bias_silu
    from nearpeak.kernels.operations.adamw import adamw_step
    from nearpeak.kernels.operations.add import add
    from nearpeak.kernels.operations.attention import (
        Attention,
        attention,
        attention_packed,
        scaled_dot_product_attention,
    )
    from nearpeak.kernels.operations.cache_append import append
    from nearpeak.kernels.operations.cross_entropy import CrossEntropyLoss, cross_entropy
    from nearpeak.kernels.operations.decode import decode_attention
    from nearpeak.kernels.operations.dropout import DropoutAdd, dropout_add
    from nearpeak.kernels.operations.experts import MoE, mixture_of_experts
    from nearpeak.kernels.operations.gated import GeGLU, SwiGLU, geglu, geglu_packed, swiglu, swiglu_packed
    from nearpeak.kernels.operations.grouped_product import grouped_product, row_groups
    from nearpeak.kernels.operations.kv_cache import KVCache
    from nearpeak.kernels.operations.linear_attention import LinearAttention, linear_attention
    from nearpeak.kernels.operations.linear_cross_entropy import linear_cross_entropy
    from nearpeak.kernels.operations.norms import LayerNorm, RMSNorm, layer_norm, rms_norm
    from nearpeak.kernels.operations.optimizer import AdamW
    from nearpeak.kernels.operations.permutation import permute_tokens, sort_tokens, unpermute_tokens
    from nearpeak.kernels.operations.product import Linear, product
    from nearpeak.kernels.operations.quantise import dequantise, quantise
    from nearpeak.kernels.operations.residual import add_layer_norm, add_rms_norm
    from nearpeak.kernels.operations.rotary import rotary, rotary_pair
    from nearpeak.kernels.operations.routing import route
    from nearpeak.kernels.operations.softmax import log_softmax, softmax
    from nearpeak.kernels.operations.transpose import transpose_copy
    from nearpeak.kernels.policy import Support, supports, using
    from nearpeak.kernels.transformers_attention import register_transformers

__all__ = [
    "AdamW",
    "Attention",
    "CrossEntropyLoss",
    "DropoutAdd",
    "GeGLU",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "MoE",
    "RMSNorm",
    "Support",
    "SwiGLU",
    "adamw_step",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "append",
    "attention",
    "attention_packed",
    "bias_gelu",
    "bias_relu_squared",
    "bias_silu",
    "cross_entropy",
    "decode_attention",
    "dequantise",
    "dropout_add",
    "geglu",
    "geglu_packed",
    "grouped_product",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "log_softmax",
    "mixture_of_experts",
    "permute_tokens",
    "product",
    "quantise",
    "register_transformers",
    "rms_norm",
    "rotary",
    "rotary_pair",
    "route",
    "row_groups",
    "scaled_dot_product_attention",
    "softmax",
    "sort_tokens",
    "supports",
    "swiglu",
    "swiglu_packed",
    "transpose_copy",
    "unpermute_tokens",
    "using",
]

_HOME = {
    "AdamW": "operations.optimizer",
    "Attention": "operations.attention",
    "CrossEntropyLoss": "operations.cross_entropy",
    "DropoutAdd": "operations.dropout",
    "GeGLU": "operations.gated",
    "KVCache": "operations.kv_cache",
    "LayerNorm": "operations.norms",
    "Linear": "operations.product",
    "LinearAttention": "operations.linear_attention",
    "MoE": "operations.experts",
    "RMSNorm": "operations.norms",
    "Support": "policy",
    "SwiGLU": "operations.gated",
    "adamw_step": "operations.adamw",
    "add": "operations.add",
    "add_layer_norm": "operations.residual",
    "add_rms_norm": "operations.residual",
    "append": "operations.cache_append",
    "attention": "operations.attention",
    "attention_packed": "operations.attention",
    "bias_gelu": "operations.activations",
    "bias_relu_squared": "operations.activations",
    "bias_silu": "operations.activations",
    "cross_entropy": "operations.cross_entropy",
    "decode_attention": "operations.decode",
    "dequantise": "operations.quantise",
    "dropout_add": "operations.dropout",
    "geglu": "operations.gated",
    "geglu_packed": "operations.gated",
    "grouped_product": "operations.grouped_product",
    "layer_norm": "operations.norms",
    "linear_attention": "operations.linear_attention",
    "linear_cross_entropy": "operations.linear_cross_entropy",
    "log_softmax": "operations.softmax",
    "mixture_of_experts": "operations.experts",
    "permute_tokens": "operations.permutation",
    "product": "operations.product",
    "quantise": "operations.quantise",
    "register_transformers": "transformers_attention",
    "rms_norm": "operations.norms",
    "rotary": "operations.rotary",
    "rotary_pair": "operations.rotary",
    "route": "operations.routing",
    "row_groups": "operations.grouped_product",
    "scaled_dot_product_attention": "operations.attention",
    "softmax": "operations.softmax",
    "sort_tokens": "operations.permutation",
    "supports": "policy",
    "swiglu": "operations.gated",
    "swiglu_packed": "operations.gated",
    "transpose_copy": "operations.transpose",
    "unpermute_tokens": "operations.permutation",
    "using": "policy",
}

__getattr__, __dir__ = names(__name__, globals(), _HOME)
