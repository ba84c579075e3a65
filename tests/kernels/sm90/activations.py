"""Launches of activations to compile."""

import torch

from nearpeak.kernels.pointwise import triton as pointwise_triton


def launches():
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype)

    for columns in (1024, 4096, 14336):
        x, bias = empty(256, columns), empty(columns)
        yield f"gelu, {columns}", lambda x=x, bias=bias: pointwise_triton.activation_forward(x, bias, "gelu")
        # the sum of the partial sums has but 32 results
        yield (
            f"gelu, {columns}, narrow",
            lambda x=x, bias=bias: pointwise_triton.activation_backward_with_bias(x, x, bias, "gelu"),
        )
    odd, few = empty(256, 1000), empty(1000)  # a multiple of 8, and not of 16
    yield "gelu, 1000", lambda: pointwise_triton.activation_forward(odd, few, "gelu")
    yield "gelu, 1000, gradient", lambda: pointwise_triton.activation_backward(odd, odd, few, "gelu")
    yield "gelu, no bias", lambda: pointwise_triton.activation_forward(x, None, "gelu")
    yield "gelu, no bias, gradient", lambda: pointwise_triton.activation_backward(x, x, None, "gelu")
    yield "gelu, tanh, gradient", lambda: pointwise_triton.activation_backward(x, x, bias, "gelu_tanh")
    yield "silu, float32", lambda: pointwise_triton.activation_backward(x.float(), x.float(), bias.float(), "silu")
