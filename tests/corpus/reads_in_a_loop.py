"""Each probability is compared in Python, one read of a tensor at a time."""

import torch

RULE = "reads-in-a-loop"
DEVICES = ("cpu", "cuda")
LENGTH = 1024


def parts(device):
    size, dtype = (24576, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    return torch.randn(size, size, device=device, dtype=dtype)


def waste(device):
    weight = parts(device)

    def step():
        scores = (weight @ weight).amax(dim=1).view(LENGTH, -1).amax(dim=1)
        return [place for place in range(LENGTH) if scores[place].item() > 0]  # waste

    return step


def clean(device):
    weight = parts(device)

    def step():
        scores = (weight @ weight).amax(dim=1).view(LENGTH, -1).amax(dim=1)
        return [place for place, score in enumerate(scores.tolist()) if score > 0]

    return step
