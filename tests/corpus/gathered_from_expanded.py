"""Features of the nearest points are gathered from all features, repeated for each point."""

import torch
from torch import nn

RULE = "gathered-from-expanded"
DEVICES = ("cpu", "cuda")


def built(device):
    torch.manual_seed(0)
    clouds, points, near, width = (8, 1024, 16, 64) if device == "cuda" else (2, 256, 8, 32)
    layer = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)).to(device)
    index = torch.randint(points, (clouds, points, near), device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, foreach=True)
    return layer, optimizer, torch.randn(clouds, points, width, device=device), index


def waste(device):
    layer, optimizer, features, index = built(device)
    points, width = features.shape[1:]

    def step():
        y = layer(features)
        table = y.unsqueeze(1).expand(-1, points, -1, -1)
        edges = table.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, width))  # waste
        edges.amax(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean(device):
    layer, optimizer, features, index = built(device)
    clouds, points, _ = features.shape
    rows = (index + points * torch.arange(clouds, device=device)[:, None, None]).flatten()

    def step():
        y = layer(features)
        edges = y.flatten(0, 1).index_select(0, rows).view(*index.shape, -1)
        edges.amax(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
