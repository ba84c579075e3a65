"""An output layer with an odd number of words: its rows, and those of the gradient, begin at odd places."""

import torch
from torch.nn import functional

RULE = "ragged-product"
DEVICES = ("cuda",)
TOKENS, WIDTH = 8192, 1024


def waste(device):
    hidden = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(50257, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(TOKENS, 50257, device=device, dtype=torch.bfloat16)

    def step():
        logits = functional.linear(hidden, head)  # waste
        return torch.autograd.grad(logits, (hidden, head), gradient)

    return step


def clean(device):
    hidden = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(50304, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(TOKENS, 50304, device=device, dtype=torch.bfloat16)

    def step():
        logits = functional.linear(hidden, head)
        return torch.autograd.grad(logits, (hidden, head), gradient)

    return step
