"""Results of a loop are joined by `torch.cat` in each round."""

import torch

RULE = "grown-by-cat"
DEVICES = ("cpu", "cuda")
ROUNDS = 64


def inputs(device):
    rows, width = (8192, 1024) if device == "cuda" else (256, 128)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    state = torch.randn(rows, width, device=device, dtype=dtype)
    return state, torch.randn(width, width, device=device, dtype=dtype) * width**-0.5


def waste(device):
    first, weight = inputs(device)

    def step():
        with torch.no_grad():
            state = first
            whole = state.unsqueeze(1)
            for _ in range(1, ROUNDS):
                state = state @ weight
                whole = torch.cat([whole, state.unsqueeze(1)], dim=1)  # waste
            return whole

    return step


def clean(device):
    first, weight = inputs(device)

    def step():
        with torch.no_grad():
            parts = [first]
            for _ in range(1, ROUNDS):
                parts.append(parts[-1] @ weight)
            return torch.stack(parts, dim=1)

    return step
