"""Launches of `add` to compile."""

import torch

from nearpeak.kernels.add import triton as add_triton


def launches():
    x = torch.empty(2**20, dtype=torch.bfloat16)
    yield "add, bfloat16", lambda: add_triton.forward(x, x)
    yield "add, float32", lambda: add_triton.forward(x.float(), x.float())
