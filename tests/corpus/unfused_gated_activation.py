"""A gated linear unit is written with a sigmoid and a product, and trained through."""

import torch
from torch.nn import functional

RULE = "unfused-gated-activation"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, size = (16384, 14336) if device == "cuda" else (1024, 1024)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, 2 * size, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(rows, size, device=device, dtype=dtype)


def waste(device):
    x, gradient = inputs(device)

    def step():
        value, gate = x.chunk(2, dim=-1)
        y = value * torch.sigmoid(gate)  # waste
        return torch.autograd.grad(y, x, gradient)

    return step


def clean(device):
    x, gradient = inputs(device)
    gated = functional.glu  # one kernel, though a slow one on a GPU; compiling takes too long for a CPU's test
    if device == "cuda":
        gated = torch.compile(lambda x: x.chunk(2, dim=-1)[0] * torch.sigmoid(x.chunk(2, dim=-1)[1]))

    def step():
        return torch.autograd.grad(gated(x), x, gradient)

    return step
