"""An activation function is written as a chain of ops, for which torch has one."""

import math

import torch
from torch.nn import functional

RULE = "unfused-pointwise"
DEVICES = ("cpu", "cuda")


def inputs(device):
    shape = (8192, 8192) if device == "cuda" else (1024, 1024)
    return torch.randn(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def waste(device):
    x = inputs(device)

    def step():
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))  # waste

    return step


def clean(device):
    x = inputs(device)

    def step():
        return functional.gelu(x, approximate="tanh")

    return step
