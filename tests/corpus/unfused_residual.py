"""A residual is added, and the sum normalized, in two kernels."""

import torch
from torch.nn import functional

RULE = "unfused-residual"
DEVICES = ("cuda",)  # compiled code is not worth its wait on a CPU


def inputs(device):
    rows, size = (32768, 4096) if device == "cuda" else (2048, 512)
    x, residual = (torch.randn(rows, size, device=device) for _ in range(2))
    return x, residual, torch.ones(size, device=device)


def waste(device):
    x, residual, weight = inputs(device)

    def step():
        total = x + residual  # waste
        return functional.layer_norm(total, total.shape[-1:], weight), total

    return step


def clean(device):
    x, residual, weight = inputs(device)

    @torch.compile
    def add_and_norm(x, residual, weight):
        total = x + residual
        return functional.layer_norm(total, total.shape[-1:], weight), total

    def step():
        return add_and_norm(x, residual, weight)

    return step
