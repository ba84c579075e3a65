"""Many small gradients are scaled one after the other, an op for each."""

import torch

RULE = "per-tensor-loop"
DEVICES = ("cpu", "cuda")


def inputs(device):
    width, count = (1024, 600) if device == "cuda" else (32, 600)
    return [torch.randn(width, width, device=device) for _ in range(count)]


def waste(device):
    gradients = inputs(device)

    def step():
        for gradient in gradients:
            gradient.mul_(0.999)  # waste

    return step


def clean(device):
    gradients = inputs(device)

    def step():
        torch._foreach_mul_(gradients, 0.999)

    return step
