"""The mean over the neighbours of a node: their number is summed in as many columns as the rows have."""

import torch

RULE = "equal-columns"
DEVICES = ("cpu", "cuda")


def mean_with_counts_of_rows(x, source, target, index):
    rows = x.index_select(0, source)
    total = torch.zeros_like(x).index_add_(0, target, rows)
    count = torch.zeros_like(x).scatter_add_(0, index.expand_as(rows), torch.ones_like(rows))  # waste
    return total / count.clamp(min=1)


def mean_with_counts(x, source, target, index):
    rows = x.index_select(0, source)
    total = torch.zeros_like(x).index_add_(0, target, rows)
    count = torch.zeros_like(x[:, :1]).scatter_add_(0, index, torch.ones_like(rows[:, :1]))
    return total / count.clamp(min=1)


def waste(device):
    return step(mean_with_counts_of_rows, device)


def clean(device):
    return step(mean_with_counts, device)


def step(mean, device):
    torch.manual_seed(0)
    nodes, edges, width = (100000, 800000, 256) if device == "cuda" else (2000, 20000, 128)
    x = torch.randn(nodes, width, device=device)
    source, target = (torch.randint(nodes, (edges,), device=device) for _ in range(2))
    return lambda: mean(x, source, target, target.unsqueeze(1))
