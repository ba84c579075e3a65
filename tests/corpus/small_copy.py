"""A short list of numbers is made on the host and copied to the device, again and again."""

import torch

RULE = "pageable-copy"
DEVICES = ("cuda",)
LAYERS = 8


def inputs(device):
    size = 4096 if device == "cuda" else 64
    x = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return x, torch.randn(size, size, dtype=torch.bfloat16, device=device) / size**0.5


def waste(device):
    start, weight = inputs(device)

    def step():
        x, kept = start, []
        for _ in range(LAYERS):
            x = x @ weight
            rows = torch.tensor([0, 5, 9]).to(device)  # waste
            kept.append(x[rows])
        return x, kept

    return step


def clean(device):
    start, weight = inputs(device)
    rows = torch.tensor([0, 5, 9], device=device)

    def step():
        x, kept = start, []
        for _ in range(LAYERS):
            x = x @ weight
            kept.append(x[rows])
        return x, kept

    return step
