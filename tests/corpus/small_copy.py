"""A short list of numbers is made on the host and copied to the device, again and again."""

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
            rows = torch.tensor([0, 5, 9]).to(device)  # waste
            kept.append(x[rows])
        return x, kept

    return step


def clean(device):
    start = inputs(device)
    rows = torch.tensor([0, 5, 9], device=device)

    def step():
        x, kept = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            kept.append(x[rows])
        return x, kept

    return step
