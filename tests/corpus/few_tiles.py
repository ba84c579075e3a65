"""Eight small products of one input, each with a weight of its own, where one product would fill the GPU."""

import torch
from torch.nn import functional

RULE = "few-tiles"
DEVICES = ("cuda",)
LAYERS, PARTS, ROWS, WIDTH, COLUMNS = 60, 8, 256, 8192, 1024


def inputs(device):
    return [torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]


def waste(device):
    layers = [
        [torch.randn(COLUMNS, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(PARTS)] for _ in range(LAYERS)
    ]
    hidden = inputs(device)

    def step():
        parts = []
        for x, weights in zip(hidden, layers, strict=True):
            parts += [functional.linear(x, weight) for weight in weights]  # waste
        return parts

    return step


def clean(device):
    layers = [torch.randn(PARTS * COLUMNS, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
    hidden = inputs(device)

    def step():
        return [functional.linear(x, weight) for x, weight in zip(hidden, layers, strict=True)]

    return step
