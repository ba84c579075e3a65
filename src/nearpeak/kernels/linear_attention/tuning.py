"""Configurations of the linear attention kernels: the measured ones, the heuristic, and candidates for the tuner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nearpeak.kernels._runtime.tuning import from_row, processors, tuned

_MIN_SEGMENT = 256
"""Tokens of a segment: the state of a shorter one takes longer than its tokens."""
_SEGMENT_MULTIPLE = 128
"""A multiple of the tokens of every chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionConfig:
    """How a kernel of linear attention is launched."""

    rows: int
    """Tokens of a chunk."""
    columns: int
    """Columns of the result of a program."""
    warps: int
    stages: int
    """Stages of the software pipeline: chunks in flight."""
    programs: int
    """Programs per multiprocessor, from which the length of segments follows."""


def kernel_config(kernel: str, widest: int, dtype: torch.dtype, device: torch.device) -> LinearAttentionConfig:
    """The configuration for heads of this size, rounded up to a power of 2. Only bfloat16 was measured."""
    row = tuned(kernel, widest, device) if dtype == torch.bfloat16 else None
    return from_row(row, LinearAttentionConfig) or heuristic(kernel, dtype)


def heuristic(kernel: str, dtype: torch.dtype) -> LinearAttentionConfig:
    """A configuration for sizes without a measurement.

    bfloat16 has 4 warps: on Hopper, matrix products of more warps in Triton 3.6 are not all deterministic.
    """
    if dtype == torch.float32:  # no tensor cores
        return LinearAttentionConfig(rows=16, columns=32, warps=8, stages=1, programs=4)
    if dtype == torch.float16:  # computed in float32
        return LinearAttentionConfig(rows=32, columns=32, warps=8, stages=1, programs=4)
    stages = 3 if kernel == "linear_attention_states" else 2
    return LinearAttentionConfig(rows=64, columns=64, warps=4, stages=stages, programs=2)


def candidates(widest: int, kernel: str = "linear_attention") -> list[LinearAttentionConfig]:
    """Configurations worth measuring for bfloat16, all with 4 warps.

    With a causal mask, the number of programs is that of the states kernel.
    """
    if kernel == "linear_attention_states":
        settings = [(*shape, 3, programs) for shape in ((64, 64), (64, 128), (128, 64)) for programs in (1, 2, 4)]
    else:
        shapes = ((64, 64), (64, 128), (64, 32), (32, 64), (128, 64))
        settings = [(*shape, 2, 2) for shape in shapes] + [(64, 64, 3, 2)]
    return [
        LinearAttentionConfig(rows=rows, columns=columns, warps=4, stages=stages, programs=programs)
        for rows, columns, stages, programs in settings
        if columns <= widest
    ]


def segment_length(tokens: int, sequences: int, blocks: int, programs: int, device: torch.device) -> int:
    """The number of tokens of a segment, so that there are `programs` programs for each multiprocessor."""
    segments = max(programs * processors(device) // max(sequences * blocks, 1), 1)
    length = -(-tokens // segments)
    return max(-(-length // _SEGMENT_MULTIPLE) * _SEGMENT_MULTIPLE, _MIN_SEGMENT)
