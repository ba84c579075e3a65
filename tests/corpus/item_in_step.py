"""A number is read from the device after each layer, and the host waits for it."""

import torch

RULE = "synchronisation"
DEVICES = ("cuda",)
LAYERS = 8


def inputs(device):
    size = 4096 if device == "cuda" else 64
    x = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return x, torch.randn(size, size, dtype=torch.bfloat16, device=device) / size**0.5


def waste(device):
    start, weight = inputs(device)

    def step():
        x, seen = start, []
        for _ in range(LAYERS):
            x = x @ weight
            seen.append(x[0, 0].item())  # waste
        return x, seen

    return step


def clean(device):
    start, weight = inputs(device)

    def step():
        x, seen = start, []
        for _ in range(LAYERS):
            x = x @ weight
            seen.append(x[0, 0])
        return x, seen

    return step
