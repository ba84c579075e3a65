"""Launches of linear attention to compile."""

import torch

from nearpeak.kernels.linear_attention import triton as linear_attention_triton


def launches():
    for dim, tokens, causal in ((128, 16384, True), (64, 16384, True), (128, 16384, False)):
        x = torch.empty(1, tokens, 16, dim, dtype=torch.bfloat16).transpose(1, 2)
        norms = torch.empty(1, 16, tokens)
        kind = f"{dim}, {'causal' if causal else 'full'}"
        given = (x, x, x, causal)
        yield f"forward {kind}", lambda given=given: linear_attention_triton.forward(*given, 1e-6)
        options = (x, x, norms, *given, True, True, True)
        yield f"backward {kind}", lambda options=options: linear_attention_triton.backward(*options)
    x = torch.empty(1, 16, 16384, 128)
    yield "forward 128, float32, small result", lambda: linear_attention_triton.forward(x, x, x, True, 1e-6)
