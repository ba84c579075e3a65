"""The rows that count are chosen with a boolean mask: the host must know how many they are."""

import torch

RULE = "synchronization"
DEVICES = ("cuda",)
LAYERS = 8


def inputs(device):
    rows, size = (16384, 8192) if device == "cuda" else (64, 64)
    x = torch.randn(rows, size, dtype=torch.bfloat16, device=device)
    return x, torch.arange(size, device=device) % 4 != 0


def waste(device):
    start, valid = inputs(device)

    def step():
        x, totals = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            totals.append(x[0][valid].sum())  # waste
        return x, totals

    return step


def clean(device):
    start, valid = inputs(device)
    counts = valid.to(torch.bfloat16)

    def step():
        x, totals = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            totals.append(torch.dot(x[0], counts))
        return x, totals

    return step
