"""The same in training: backward has a longer chain than forward."""

import math

import torch
from torch.nn import functional

RULE = "unfused-pointwise"
DEVICES = ("cpu", "cuda")


def inputs(device):
    shape = (4096, 8192) if device == "cuda" else (1024, 1024)
    x = torch.randn(shape, device=device, requires_grad=True)
    return x, torch.randn_like(x)


def waste(device):
    x, gradient = inputs(device)

    def step():
        x.grad = None
        y = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))  # waste
        y.backward(gradient)

    return step


def clean(device):
    x, gradient = inputs(device)

    def step():
        x.grad = None
        functional.gelu(x, approximate="tanh").backward(gradient)

    return step
