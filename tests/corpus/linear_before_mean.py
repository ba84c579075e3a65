"""Every token is projected, and then the mean over the tokens is taken."""

import torch
from torch import nn

RULE = "linear-before-mean"
DEVICES = ("cpu", "cuda")


class Pooled(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.norm(x).mean(dim=1))


class Late(Pooled):
    def forward(self, x):
        return self.head(self.norm(x)).mean(dim=1)  # waste


def waste(device):
    return training(Late, device)


def clean(device):
    return training(Pooled, device)


def training(kind, device):
    torch.manual_seed(0)
    batch, tokens, width, classes = (256, 256, 1024, 1024) if device == "cuda" else (32, 64, 256, 256)
    model = kind(width, classes).to(device)
    x = torch.randn(batch, tokens, width, device=device)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()

    return step
