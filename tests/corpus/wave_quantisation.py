"""A product of 17 x 16 tiles on a GPU that computes 132 at a time: a third wave for the last eight of them."""

import torch

RULE = "wave-quantisation"
DEVICES = ("cuda",)
REPEATS = 16


def build(device, rows):
    x = torch.randn(rows, 8192, device=device, dtype=torch.bfloat16)
    return x, [torch.randn(8192, 2048, device=device, dtype=torch.bfloat16) for _ in range(REPEATS)]


def waste(device):
    x, weights = build(device, 17 * 128)

    def step():
        return [x @ weight for weight in weights]  # waste

    return step


def clean(device):
    x, weights = build(device, 16 * 128)

    def step():
        return [x @ weight for weight in weights]

    return step
