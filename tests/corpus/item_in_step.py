"""A number is read from the device after each layer, and the host waits for it."""

import torch

RULE = "synchronization"
DEVICES = ("cuda",)
LAYERS = 32


def inputs(device):
    rows, size = (2048, 8192) if device == "cuda" else (64, 64)
    return torch.randn(rows, size, dtype=torch.bfloat16, device=device)


def waste(device):
    start = inputs(device)

    def step():
        x, seen = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            seen.append(x[0, 0].item())  # waste
        return x, seen

    return step


def clean(device):
    start = inputs(device)

    def step():
        x, seen = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            seen.append(x[0, 0])
        return x, seen

    return step
