"""A history is encoded once for each of its samples."""

import torch
from torch import nn

RULE = "repeated-rows"
DEVICES = ("cpu", "cuda")


def built(device):
    torch.manual_seed(0)
    rows, width = (4096, 1024) if device == "cuda" else (256, 256)
    encoder = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())])
    return encoder.to(device), nn.Linear(width, 1).to(device), torch.randn(rows, width, device=device)


def waste(device):
    encoder, head, history = built(device)

    @torch.no_grad()
    def step():
        hidden = encoder(history.repeat_interleave(16, dim=0))  # waste
        return head(hidden + 0.1 * torch.randn_like(hidden)).mean()

    return step


def clean(device):
    encoder, head, history = built(device)

    @torch.no_grad()
    def step():
        hidden = encoder(history).repeat_interleave(16, dim=0)
        return head(hidden + 0.1 * torch.randn_like(hidden)).mean()

    return step
