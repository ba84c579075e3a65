"""Launches of `add` to compile."""

import torch

from nearpeak.kernels.pointwise import triton as pointwise_triton


def launches():
    x = torch.empty(2**20, dtype=torch.bfloat16)
    yield "add, bfloat16", lambda: pointwise_triton.add(x, x)
    yield "add, float32", lambda: pointwise_triton.add(x.float(), x.float())
