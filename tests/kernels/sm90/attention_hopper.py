"""Launches of attention for Hopper to compile."""

import torch

from nearpeak.kernels.jit import attention_hopper_launch
from nearpeak.kernels.jit.attention_launch import Problem


def launches():
    for dim, causal in ((64, True), (64, False), (128, True)):
        x = torch.empty(2, 4, 1024, dim, dtype=torch.bfloat16)
        lse = torch.empty(2, 4, 1024)
        problem = Problem(x, x, x, *[None] * 6, 0, 0, -1, 0 if causal else -1, True, dim**-0.5, 0.0, 0.0)
        if not attention_hopper_launch.takes(problem):
            return  # another version of Triton
        kind = f"{dim}, {'causal' if causal else 'full'}"
        yield f"forward {kind}", lambda problem=problem: attention_hopper_launch.forward(problem)
        given = (problem, x, None, x, lse, True, True)
        yield f"backward {kind}", lambda given=given: attention_hopper_launch.backward(*given)
