"""A weight is copied into another order in every step."""

import torch

RULE = "weight-copied"
DEVICES = ("cpu", "cuda")


class Product(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x, copied):
        if copied:
            return x @ self.weight.t().contiguous()  # waste
        return x @ self.weight.t()


def predicting(device):
    width, rows = (8192, 512) if device == "cuda" else (2048, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Product(width).to(device, dtype)
    return model, torch.randn(rows, width, device=device, dtype=dtype)


def waste(device):
    model, x = predicting(device)

    @torch.no_grad()
    def step():
        return model(x, copied=True)

    return step


def clean(device):
    model, x = predicting(device)

    @torch.no_grad()
    def step():
        return model(x, copied=False)

    return step
