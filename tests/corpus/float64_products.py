"""A network is cast to float64, since its inputs come from NumPy."""

import torch
from torch import nn

RULE = "float64-products"
DEVICES = ("cpu",)  # a GPU for computing centers multiplies in float64 as fast as in float32 without tf32


def network(device, dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers).to(device, dtype)
    x = torch.randn(512, 256, device=device, dtype=dtype)

    def step():
        return model(x).square().mean().backward()  # waste

    return step


def waste(device):
    return network(device, torch.float64)


def clean(device):
    return network(device, torch.float32)
