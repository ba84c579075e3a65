"""Launches of `dropout_add` to compile."""

import torch

from nearpeak.kernels.pointwise import triton as pointwise_triton


def launches():
    seed = torch.empty((), dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(2**20, dtype=dtype)
        yield f"forward, {dtype}", lambda x=x: pointwise_triton.dropout_add(x, x, seed, 0.1)
        yield f"backward, {dtype}", lambda x=x: pointwise_triton.dropout_backward(x, seed, 0.1, x.dtype)
