"""A buffer is zeroed, and then every element of it is written."""

import torch

RULE = "zeroed-then-overwritten"
DEVICES = ("cpu", "cuda")


def inputs(device):
    size = (8192, 8192) if device == "cuda" else (1024, 1024)
    return torch.randn(size, device=device)


def waste(device):
    x = inputs(device)

    def step():
        out = torch.zeros_like(x)  # waste
        torch.exp(x, out=out)
        return out

    return step


def clean(device):
    x = inputs(device)

    def step():
        out = torch.empty_like(x)
        torch.exp(x, out=out)
        return out

    return step
