"""RMSNorm is written as ops in float32 with casts around them, as many models have it."""

import torch
from torch.nn import functional

RULE = "unfused-norm"
DEVICES = ("cuda",)  # torch has no kernel of it for CPUs


def inputs(device):
    rows, size = (16384, 4096) if device == "cuda" else (2048, 512)
    x = torch.randn(rows, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(size, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, weight, torch.randn_like(x)


def waste(device):
    x, weight, gradient = inputs(device)

    def step():
        rows = x.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)  # waste
        y = weight * rows.to(x.dtype)
        return torch.autograd.grad(y, (x, weight), gradient)

    return step


def clean(device):
    x, weight, gradient = inputs(device)

    def step():
        y = functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
        return torch.autograd.grad(y, (x, weight), gradient)

    return step
