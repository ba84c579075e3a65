"""A model that only predicts is still in training mode, and drops activations."""

import torch

RULE = "dropout-in-inference"
DEVICES = ("cpu", "cuda")


class Block(torch.nn.Module):
    def __init__(self, width, dropped):
        super().__init__()
        self.up = torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(dropped)

    def forward(self, x):
        return self.dropout(self.up(x))  # waste


def predicting(device):
    width, rows = (2048, 16384) if device == "cuda" else (256, 2048)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = torch.nn.Sequential(*(Block(width, 0.1) for _ in range(4))).to(device, dtype)
    return model, torch.randn(rows, width, device=device, dtype=dtype)


def waste(device):
    model, x = predicting(device)

    @torch.no_grad()
    def step():
        return model(x)

    return step


def clean(device):
    model, x = predicting(device)
    model.eval()

    @torch.no_grad()
    def step():
        return model(x)

    return step
