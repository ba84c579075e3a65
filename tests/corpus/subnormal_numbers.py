"""Distances are spread over Gaussians, whose tails are subnormal numbers, and multiplied by a layer."""

import torch

RULE = "subnormal-numbers"
DEVICES = ("cpu",)


def network(spread):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 256)
    centers = torch.linspace(0, 4, 64)
    distances = 4 * torch.rand(1024, 1)

    def step():
        with torch.no_grad():
            edges = spread(torch.exp(-0.5 * ((distances - centers) * 16).square()))
            return layer(edges).relu()  # waste

    return step


def waste(device):
    return network(lambda edges: edges)


def clean(device):
    return network(lambda edges: torch.where(edges < 1e-30, 0.0, edges))
