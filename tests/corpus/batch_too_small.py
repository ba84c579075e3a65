"""A model answers four samples at a time, and reads all its weights for them."""

import torch
from torch import nn

RULE = "batch-too-small"
DEVICES = ("cpu", "cuda")
ROWS = {"cuda": (4, 512), "cpu": (1, 64)}


def work(device):
    """How many times as much the clean step does."""
    few, many = ROWS[device]
    return many / few


def build(device, rows):
    width, layers = (8192, 32) if device == "cuda" else (2048, 4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)))
    x = torch.randn(rows, width, device=device, dtype=dtype)
    return model.requires_grad_(False), x


def waste(device):
    model, x = build(device, ROWS[device][0])

    def step():
        return model(x)

    return step


def clean(device):
    model, x = build(device, ROWS[device][1])

    def step():
        return model(x)

    return step
