"""A short list of numbers is made on the host and copied to the device, again and again."""

import random

import torch

RULE = "pageable-copy"
DEVICES = ("cuda",)
LAYERS = 32


def inputs(device):
    rows, size = (2048, 8192) if device == "cuda" else (64, 64)
    return torch.randn(rows, size, dtype=torch.bfloat16, device=device)


def waste(device):
    start = inputs(device)

    def step():
        x, kept = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            rows = torch.tensor(random.sample(range(len(x)), 3)).to(device)  # waste
            kept.append(x[rows])
        return x, kept

    return step


def clean(device):
    start = inputs(device)

    def step():
        x, kept = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            rows = torch.randint(len(x), (3,), device=device)
            kept.append(x[rows])
        return x, kept

    return step
