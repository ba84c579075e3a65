"""Launches of `add` to compile."""

import torch

from nearpeak.kernels.jit import add


def launches():
    x = torch.empty(2**20, dtype=torch.bfloat16)
    yield "add, bfloat16", lambda: add.forward(x, x)
    yield "add, float32", lambda: add.forward(x.float(), x.float())
