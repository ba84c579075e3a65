"""Every block is computed a second time in the backward pass, with most of the memory unused."""

import torch
from torch.utils.checkpoint import checkpoint

RULE = "needless-recompute"
DEVICES = ("cpu", "cuda")


class Stack(torch.nn.Module):
    def __init__(self, width, depth, again):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)
        )
        self.again = again

    def forward(self, x):
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, use_reentrant=False)  # waste
            else:
                x = block(x)
        return x


def training(device, again):
    width, rows, depth = (4096, 16384, 6) if device == "cuda" else (512, 1024, 4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Stack(width, depth, again).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    x, gradient = torch.randn(2, rows, width, device=device, dtype=dtype)

    def step():
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return training(device, again=True)


def clean(device):
    return training(device, again=False)
