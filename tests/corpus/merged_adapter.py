"""An adapter of low rank is merged into its frozen weight in every training step."""

import torch
from torch import nn
from torch.nn import functional

RULE = "merged-adapter"
DEVICES = ("cpu", "cuda")


class Adapted(nn.Module):
    def __init__(self, width, rank, merged):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.b = nn.Parameter(torch.zeros(width, rank))
        self.merged = merged

    def forward(self, x):
        if self.merged:
            return functional.linear(x, self.weight + 2.0 * (self.b @ self.a))  # waste
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.a), 2.0 * self.b)


def step(device, merged):
    torch.manual_seed(0)
    width, rows, dtype = (4096, 4096, torch.bfloat16) if device == "cuda" else (1024, 1024, torch.float32)
    model = nn.Sequential(*[Adapted(width, 8, merged) for _ in range(3)]).to(device, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    x = torch.randn(rows, width, device=device, dtype=dtype)

    def train():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return train


def waste(device):
    return step(device, merged=True)


def clean(device):
    return step(device, merged=False)
