"""A product of 26 x 8 tiles on a GPU that computes 132 at a time: its second wave has 76 of them."""

import torch

RULE = "wave-quantization"
DEVICES = ("cuda",)
REPEATS = 16
ROWS = 26 * 128, 32 * 128


def work(device):
    """How many times as much the clean step does."""
    return ROWS[1] / ROWS[0]


def build(device, rows):
    x = torch.randn(rows, 8192, device=device, dtype=torch.bfloat16)
    return x, [torch.randn(8192, 2048, device=device, dtype=torch.bfloat16) for _ in range(REPEATS)]


def waste(device):
    x, weights = build(device, ROWS[0])

    def step():
        return [x @ weight for weight in weights]  # waste

    return step


def clean(device):
    x, weights = build(device, ROWS[1])

    def step():
        return [x @ weight for weight in weights]

    return step
