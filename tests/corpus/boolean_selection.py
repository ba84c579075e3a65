"""The similarities of all pairs but those of a view with itself are selected by a mask."""

import torch
from torch.nn import functional

RULE = "boolean-selection"
DEVICES = ("cpu", "cuda")


def built(device):
    torch.manual_seed(0)
    rows, width = (4096, 128) if device == "cuda" else (512, 64)
    return torch.nn.functional.normalize(torch.randn(rows, width, device=device), dim=1).requires_grad_()


def waste(device):
    z = built(device)

    def step():
        z.grad = None
        similarity = z @ z.T * 10
        others = ~torch.eye(len(z), dtype=torch.bool, device=device)
        logits = similarity[others].view(len(z), -1)  # waste
        functional.cross_entropy(logits, torch.arange(len(z), device=device) // 2).backward()

    return step


def clean(device):
    z = built(device)

    def step():
        z.grad = None
        similarity = z @ z.T * 10
        others = ~torch.eye(len(z), dtype=torch.bool, device=device)
        logits = similarity.masked_fill(~others, float("-inf"))
        functional.cross_entropy(logits, torch.arange(len(z), device=device) // 2 + 1).backward()

    return step
