"""A transposed activation is made contiguous before a product, which takes either order."""

import torch

RULE = "copied-for-layout"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, columns, dtype = (16384, 8192, torch.bfloat16) if device == "cuda" else (2048, 1024, torch.float32)
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    return x, torch.randn(rows, 256 if device == "cuda" else 64, device=device, dtype=dtype)


def waste(device):
    x, y = inputs(device)

    def step():
        return x.t().contiguous() @ y  # waste

    return step


def clean(device):
    x, y = inputs(device)

    def step():
        return x.t() @ y

    return step
