"""Launches of attention for Hopper to compile."""

import torch

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels.attention.triton import AttentionProblem


def launches():
    if not gluon.runs_on(torch.device("cpu")):
        return  # another version of Triton
    from nearpeak.kernels.attention import sm90

    for dim, causal in ((64, True), (64, False), (128, True)):
        x = torch.empty(2, 4, 1024, dim, dtype=torch.bfloat16)
        lse = torch.empty(2, 4, 1024)
        problem = AttentionProblem(x, x, x, *[None] * 6, 0, 0, -1, 0 if causal else -1, True, dim**-0.5, 0.0, 0.0)
        kind = f"{dim}, {'causal' if causal else 'full'}"
        yield f"forward {kind}", lambda problem=problem: sm90.forward(problem)
        given = (problem, x, None, x, lse, True, True)
        yield f"backward {kind}", lambda given=given: sm90.backward(*given)
