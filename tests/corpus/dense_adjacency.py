"""The adjacency of a graph is a dense matrix, of which nearly all elements are zeros."""

import torch

RULE = "sparse-as-dense"
DEVICES = ("cpu", "cuda")
EACH = 4


def parts(device):
    torch.manual_seed(0)
    nodes, width = (20_000, 512) if device == "cuda" else (2000, 64)
    neighbors = torch.randint(nodes, (nodes, EACH), device=device)
    return neighbors, torch.randn(nodes, width, device=device)


def waste(device):
    neighbors, features = parts(device)
    adjacency = torch.zeros(len(neighbors), len(neighbors), device=device).scatter_(1, neighbors, 1 / EACH)

    def step():
        with torch.no_grad():
            return (adjacency @ features).relu()  # waste

    return step


def clean(device):
    neighbors, features = parts(device)

    def step():
        with torch.no_grad():
            return features[neighbors].mean(dim=1).relu()

    return step
