"""Launches of gated activations to compile."""

import torch

from nearpeak.kernels.pointwise import triton as pointwise_triton


def launches():
    packed, gate = torch.empty(256, 2 * 14336, dtype=torch.bfloat16), torch.empty(256, 14336, dtype=torch.bfloat16)
    yield "swiglu", lambda: pointwise_triton.gated_forward(gate, gate, "silu")
    yield "swiglu, gradient", lambda: pointwise_triton.gated_backward(gate, gate, gate, "silu")
    yield "swiglu of views", lambda: pointwise_triton.gated_forward(*packed.chunk(2, -1), "silu")
    for interleaved in (False, True):
        name = f"geglu, packed, {interleaved=}"
        yield name, lambda interleaved=interleaved: pointwise_triton.gated_packed_forward(packed, "gelu", interleaved)
        yield (
            f"{name}, gradient",
            lambda interleaved=interleaved: pointwise_triton.gated_packed_backward(gate, packed, "gelu", interleaved),
        )
    yield (
        "swiglu, packed, after a product",
        lambda: pointwise_triton.gated_packed_forward(packed, "silu", False, early=True),
    )
    odd = torch.empty(256, 2000, dtype=torch.bfloat16)
    yield "swiglu, packed, 1000", lambda: pointwise_triton.gated_packed_forward(odd, "silu", False)
    yield (
        "swiglu, gradient, float32",
        lambda: pointwise_triton.gated_backward(gate.float(), gate.float(), gate.float(), "silu"),
    )
