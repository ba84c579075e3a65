"""SwiGLU in inference as two ops."""

import torch
from torch.nn import functional

RULE = "unfused-gated-activation"
DEVICES = ("cuda",)  # compiled code is not worth its wait on a CPU


def inputs(device):
    rows, size = (16384, 14336) if device == "cuda" else (1024, 1024)
    return [torch.randn(rows, size, device=device, dtype=torch.bfloat16) for _ in range(2)]


def waste(device):
    gate, up = inputs(device)

    def step():
        return functional.silu(gate) * up  # waste

    return step


def clean(device):
    gate, up = inputs(device)
    gated = torch.compile(lambda gate, up: functional.silu(gate) * up)

    def step():
        return gated(gate, up)

    return step
