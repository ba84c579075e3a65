"""Traces of earlier inputs decay until they are subnormal numbers, and are multiplied by a layer."""

import torch

RULE = "subnormal-numbers"
DEVICES = ("cpu",)


def network(youngest):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 256)
    ages = youngest + 200 * torch.rand(1024, 64)

    def step():
        with torch.no_grad():
            traces = 0.9**ages
            return layer(traces).relu()  # waste

    return step


def waste(device):
    return network(800)


def clean(device):
    return network(100)
