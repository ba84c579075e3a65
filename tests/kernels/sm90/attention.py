"""Launches of attention to compile."""

import torch

from nearpeak.kernels.attention import triton as attention_triton
from nearpeak.kernels.attention.triton import AttentionProblem


def launches():
    for dim in (64, 128):
        for causal in (False, True):
            kind = f"{dim}, {'causal' if causal else 'full'}"
            x = torch.empty(2, 4, 1024, dim, dtype=torch.bfloat16)
            lse = torch.empty(2, 4, 1024)
            problem = AttentionProblem(x, x, x, *[None] * 6, 0, 0, -1, 0 if causal else -1, True, dim**-0.5, 0.0, 0.0)
            yield f"forward {kind}", lambda problem=problem: attention_triton.forward(problem)
            given = (problem, x, None, x, lse, True, True, False, False)
            yield f"backward {kind}", lambda given=given: attention_triton.backward(*given)
    x, lse = torch.empty(1024, 4, 64, dtype=torch.bfloat16).transpose(0, 1).unsqueeze(0), torch.empty(1, 4, 1024)
    starts = torch.tensor([0, 300, 1000], dtype=torch.int32)
    yield "narrow: after the last sequence", lambda: attention_triton.fill_tail(starts, x, x, lse)
