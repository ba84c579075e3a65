"""Fused kernels: operations that move each byte once, as functions that are differentiable and safe to compile.

    from nearpeak import kernels
    y = kernels.softmax(x)                    # a Triton kernel on a GPU, plain torch elsewhere
    kernels.supports(kernels.softmax, x)      # which of them, and why
    kernels.choices()                         # which backend ran, where there are several: Gluon, Triton or torch's own
    with kernels.using("require"): ...        # raise rather than run plain torch

Every operation is a package of its own, and most have the name of their function. All are imported here, at once: a
function that was filled in later would be replaced by the package of the same name. So modules below are imported as
`from nearpeak.kernels.softmax import triton`, never as `import nearpeak.kernels.softmax.triton`.
"""

from nearpeak.kernels._runtime.choice import Choice, choices
from nearpeak.kernels._runtime.policy import Support, supports, using
from nearpeak.kernels.attention import (
    Attention,
    attention,
    attention_fp8,
    attention_packed,
    scaled_dot_product_attention,
)
from nearpeak.kernels.decode import KVCache, append, decode_attention
from nearpeak.kernels.gemm import Linear, gemm
from nearpeak.kernels.gemm.grouped import grouped_gemm, row_groups
from nearpeak.kernels.linear_attention import LinearAttention, linear_attention
from nearpeak.kernels.losses import CrossEntropyLoss, cross_entropy, linear_cross_entropy
from nearpeak.kernels.moe import MoE, moe, permute_tokens, route, sort_tokens, unpermute_tokens
from nearpeak.kernels.norms import LayerNorm, RMSNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from nearpeak.kernels.optimizer import AdamW, adamw_step
from nearpeak.kernels.pointwise import (
    DropoutAdd,
    GeGLU,
    SwiGLU,
    add,
    bias_gelu,
    bias_relu_squared,
    bias_silu,
    dropout_add,
    geglu,
    geglu_packed,
    swiglu,
    swiglu_packed,
)
from nearpeak.kernels.quantize import dequantize, quantize
from nearpeak.kernels.rotary import rotary, rotary_pair
from nearpeak.kernels.softmax import log_softmax, softmax
from nearpeak.kernels.transformers import register_transformers
from nearpeak.kernels.transpose import transpose_copy

__all__ = [
    "AdamW",
    "Attention",
    "Choice",
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
    "attention_fp8",
    "attention_packed",
    "bias_gelu",
    "bias_relu_squared",
    "bias_silu",
    "choices",
    "cross_entropy",
    "decode_attention",
    "dequantize",
    "dropout_add",
    "geglu",
    "geglu_packed",
    "gemm",
    "grouped_gemm",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "log_softmax",
    "moe",
    "permute_tokens",
    "quantize",
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
