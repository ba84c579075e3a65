"""Launches of activations to compile."""

import torch

from nearpeak.kernels.jit import activations


def launches():
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype)

    for columns in (1024, 4096, 14336):
        x, bias = empty(256, columns), empty(columns)
        yield f"gelu, {columns}", lambda x=x, bias=bias: activations.forward(x, bias, "gelu")
        # the sum of the partial sums has but 32 results
        yield f"gelu, {columns}, narrow", lambda x=x, bias=bias: activations.backward_with_bias(x, x, bias, "gelu")
    odd, few = empty(256, 1000), empty(1000)  # a multiple of 8, and not of 16
    yield "gelu, 1000", lambda: activations.forward(odd, few, "gelu")
    yield "gelu, 1000, gradient", lambda: activations.backward(odd, odd, few, "gelu")
    yield "gelu, no bias", lambda: activations.forward(x, None, "gelu")
    yield "gelu, no bias, gradient", lambda: activations.backward(x, x, None, "gelu")
    yield "gelu, tanh, gradient", lambda: activations.backward(x, x, bias, "gelu_tanh")
    yield "silu, float32", lambda: activations.backward(x.float(), x.float(), bias.float(), "silu")
