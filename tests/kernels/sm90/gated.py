"""Launches of gated activations to compile."""

import torch

from nearpeak.kernels.jit import gated


def launches():
    packed, gate = torch.empty(256, 2 * 14336, dtype=torch.bfloat16), torch.empty(256, 14336, dtype=torch.bfloat16)
    yield "swiglu", lambda: gated.forward(gate, gate, "silu")
    yield "swiglu, gradient", lambda: gated.backward(gate, gate, gate, "silu")
    yield "swiglu of views", lambda: gated.forward(*packed.chunk(2, -1), "silu")
    for interleaved in (False, True):
        name = f"geglu, packed, {interleaved=}"
        yield name, lambda interleaved=interleaved: gated.forward_packed(packed, "gelu", interleaved)
        yield (
            f"{name}, gradient",
            lambda interleaved=interleaved: gated.backward_packed(gate, packed, "gelu", interleaved),
        )
    odd = torch.empty(256, 2000, dtype=torch.bfloat16)
    yield "swiglu, packed, 1000", lambda: gated.forward_packed(odd, "silu", False)
    yield "swiglu, gradient, float32", lambda: gated.backward(gate.float(), gate.float(), gate.float(), "silu")
