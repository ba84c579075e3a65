"""Every residual block keeps a copy of its input, which nobody changes."""

import torch
from torch import nn

RULE = "needless-copy"
DEVICES = ("cpu", "cuda")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x):
        return torch.addmm(x, x, self.weight)


class CopyingBlock(Block):
    def forward(self, x):
        residual = x.clone()  # waste
        return torch.addmm(residual, x, self.weight)


def waste(device):
    return training(CopyingBlock, device)


def clean(device):
    return training(Block, device)


def training(block, device):
    torch.manual_seed(0)
    rows, width = (132 * 512, 512) if device == "cuda" else (16384, 64)
    model = nn.Sequential(*[block(width) for _ in range(4)]).to(device)
    x = torch.randn(rows, width, device=device)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return step
