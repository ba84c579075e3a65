"""Launches of attention for Hopper to compile."""

import torch

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels.attention.triton import AttentionProblem

# dim, value dim, causal
SIZES = [
    (64, 64, True), (64, 64, False), (80, 80, True), (96, 96, True), (128, 128, True), (192, 128, True),
    (192, 192, False), (256, 256, False),
]  # fmt: skip


def launches():
    if not gluon.runs_on(torch.device("cpu")):
        return  # another version of Triton
    from nearpeak.kernels.attention import sm90
    from nearpeak.kernels.attention.fp8_triton import quantized

    for dim, value_dim, causal in SIZES:
        query, value = (torch.empty(2, 4, 1024, size, dtype=torch.bfloat16) for size in (dim, value_dim))
        lse = torch.empty(2, 4, 1024)
        right = 0 if causal else -1
        problem = AttentionProblem(query, query, value, *[None] * 6, 0, 0, -1, right, True, dim**-0.5, 0.0, 0.0)
        kind = f"{dim}, {value_dim}, {'causal' if causal else 'full'}"
        yield f"forward {kind}", lambda problem=problem: sm90.forward(problem)
        if dim in (64, 96, 128) and causal:
            sinks = torch.empty(4, dtype=torch.bfloat16)
            rest = (None, None, sinks, *[None] * 3, 0, 0, 512, 0, True, dim**-0.5, 0.0, 0.0)
            windowed = AttentionProblem(query, query, value, *rest)
            given = (windowed, value, None, value, lse, True, True)
            if dim != 96:
                yield f"forward {kind}, window", lambda windowed=windowed: sm90.forward(windowed)
            yield f"backward {kind}, window", lambda given=given: sm90.backward(*given)
        if sm90.supports_fp8(problem):
            yield (
                f"fp8 {kind}",
                lambda problem=problem: sm90.forward(problem, quantized(problem.query, problem.key, problem.value)),
            )
        if sm90.supports_backward(problem) and dim != 80:  # which has the tiles of 96
            given = (problem, value, None, value, lse, True, True)
            yield f"backward {kind}", lambda given=given: sm90.backward(*given)
