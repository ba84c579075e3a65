"""Launches of attention to compile."""

import torch

from nearpeak.kernels.jit import attention_backward, attention_forward
from nearpeak.kernels.jit.attention_launch import Problem


def launches():
    for dim in (64, 128):
        for causal in (False, True):
            kind = f"{dim}, {'causal' if causal else 'full'}"
            x = torch.empty(2, 4, 1024, dim, dtype=torch.bfloat16)
            lse = torch.empty(2, 4, 1024)
            problem = Problem(x, x, x, *[None] * 6, 0, 0, -1, 0 if causal else -1, True, dim**-0.5, 0.0, 0.0)
            yield f"forward {kind}", lambda problem=problem: attention_forward.forward(problem)
            given = (problem, x, None, x, lse, True, True, False, False)
            yield f"backward {kind}", lambda given=given: attention_backward.backward(*given)
