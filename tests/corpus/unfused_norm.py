"""LayerNorm is written as ops, and trained through."""

import torch
from torch.nn import functional

RULE = "unfused-norm"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, size = (16384, 4096) if device == "cuda" else (2048, 512)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, size, device=device, dtype=dtype, requires_grad=True)
    weight, bias = (torch.ones(size, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    return x, weight, bias, torch.randn_like(x)


def waste(device):
    x, weight, bias, gradient = inputs(device)

    def step():
        centered = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)  # waste
        y = centered * scale * weight + bias
        return torch.autograd.grad(y, (x, weight, bias), gradient)

    return step


def clean(device):
    x, weight, bias, gradient = inputs(device)

    def step():
        y = functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
        return torch.autograd.grad(y, (x, weight, bias), gradient)

    return step
