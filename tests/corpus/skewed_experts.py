"""Experts of a layer run in a loop, the first with thousands of rows and most with a few."""

import torch

RULE = "skewed-experts"
DEVICES = ("cuda",)
EXPERTS = 64


def inputs(device):
    rows = [max(16, 4096 >> number) for number in range(EXPERTS)]
    x = torch.randn(sum(rows), 2048, device=device, dtype=torch.bfloat16)
    weights = torch.randn(EXPERTS, 2048, 2048, device=device, dtype=torch.bfloat16)
    return x, weights, rows


def waste(device):
    x, weights, rows = inputs(device)

    def step():
        return [part @ weights[number] for number, part in enumerate(x.split(rows))]  # waste

    return step


def clean(device):
    x, weights, rows = inputs(device)
    ends = torch.tensor(rows, device=device).cumsum(0, dtype=torch.int32)

    def step():
        return torch._grouped_mm(x, weights, offs=ends)

    return step
