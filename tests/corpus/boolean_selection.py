"""The similarities of all pairs but those of a view with itself are selected by a mask."""

import torch
from torch.nn import functional

RULE = "boolean-selection"
DEVICES = ("cpu", "cuda")


def built(device):
    torch.manual_seed(0)
    rows, width = (12288, 128) if device == "cuda" else (512, 64)
    z = functional.normalize(torch.randn(rows, width, device=device), dim=1).requires_grad_()
    return z, ~torch.eye(rows, dtype=torch.bool, device=device), torch.arange(rows, device=device)


def waste(device):
    z, others, numbers = built(device)

    def step():
        z.grad = None
        similarity = z @ z.T * 10
        logits = similarity[others].view(len(z), -1)  # waste
        functional.cross_entropy(logits, numbers.clamp_max(len(z) - 2)).backward()

    return step


def clean(device):
    z, others, numbers = built(device)

    def step():
        z.grad = None
        similarity = z @ z.T * 10
        logits = similarity.masked_fill(~others, float("-inf"))
        functional.cross_entropy(logits, (numbers + 1).clamp_max(len(z) - 1)).backward()

    return step
