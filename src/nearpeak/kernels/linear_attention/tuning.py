"""Configurations of the linear attention kernels: the heuristic, and the candidates for the tuner.

Tokens of a chunk, columns of the result per program, warps, pipeline stages, and the number of programs per
multiprocessor, which determines the length of segments.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from nearpeak.kernels._runtime.tuning import processors, tuned

_MIN_SEGMENT = 256
"""Tokens of a segment: below, its state takes longer than its tokens."""
_SEGMENT_MULTIPLE = 128
"""All numbers of tokens of a chunk divide this."""


def config_of(kernel: str, widest: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The configuration of a kernel for heads of this size, rounded up to a power of 2. bfloat16 alone is measured."""
    found = tuned(kernel, widest, device) if dtype == torch.bfloat16 else None
    return found or heuristic(kernel, dtype)


def heuristic(kernel: str, dtype: torch.dtype) -> dict[str, Any]:
    """What serves where nobody measured.

    bfloat16 has 4 warps, as matrix products of more on Hopper are not all repeatable with Triton 3.6.
    """
    if dtype == torch.float32:  # no tensor cores
        return {"rows": 16, "columns": 32, "warps": 8, "stages": 1, "programs": 4}
    if dtype == torch.float16:  # computed in float32
        return {"rows": 32, "columns": 32, "warps": 8, "stages": 1, "programs": 4}
    stages = 3 if kernel == "linear_attention_states" else 2
    return {"rows": 64, "columns": 64, "warps": 4, "stages": stages, "programs": 2}


def candidates(widest: int, kernel: str = "linear_attention") -> list[dict[str, Any]]:
    """Configurations worth measuring for bfloat16: all of 4 warps, see `heuristic`.

    How many programs there are follows from those of states, where queries see the keys before them alone.
    """
    if kernel == "linear_attention_states":
        found = [(*shape, 3, programs) for shape in ((64, 64), (64, 128), (128, 64)) for programs in (1, 2, 4)]
    else:
        shapes = ((64, 64), (64, 128), (64, 32), (32, 64), (128, 64))
        found = [(*shape, 2, 2) for shape in shapes] + [(64, 64, 3, 2)]
    return [
        {"rows": rows, "columns": columns, "warps": 4, "stages": stages, "programs": programs}
        for rows, columns, stages, programs in found
        if columns <= widest
    ]


def segment_of(tokens: int, sequences: int, blocks: int, config: dict[str, Any], device: torch.device) -> int:
    """How many tokens a segment has, so that there are programs for all processors."""
    wanted = config["programs"] * processors(device)
    segments = max(wanted // max(sequences * blocks, 1), 1)
    return int(max(triton.cdiv(triton.cdiv(tokens, segments), _SEGMENT_MULTIPLE) * _SEGMENT_MULTIPLE, _MIN_SEGMENT))
