"""Results of a loop are joined by `torch.cat` in each round."""

import torch

RULE = "grown-by-cat"
DEVICES = ("cpu", "cuda")
ROUNDS = 64


def inputs(device):
    rows, width = (8192, 1024) if device == "cuda" else (256, 128)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(rows, width, device=device, dtype=dtype)


def waste(device):
    x = inputs(device)

    def step():
        with torch.no_grad():
            whole = x.tanh().unsqueeze(1)
            for number in range(1, ROUNDS):
                whole = torch.cat([whole, (x * number).unsqueeze(1)], dim=1)  # waste
            return whole

    return step


def clean(device):
    x = inputs(device)

    def step():
        with torch.no_grad():
            parts = [x.tanh(), *(x * number for number in range(1, ROUNDS))]
            return torch.stack(parts, dim=1)

    return step
