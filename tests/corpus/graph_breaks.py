"""A compiled function is broken in two in its middle, for a print that is rarely wanted."""

import torch

RULE = "graph-breaks"
DEVICES = ("cuda",)
LAYERS = 60
SIZE = 2816
"""So that a layer takes longer than one graph needs to launch it, and less than two graphs with Python between."""


def parts(device):
    weight = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) / SIZE**0.5
    return torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16), weight


def broken(x, weight):
    for_relu = x @ weight
    print(end="")  # waste
    return for_relu.relu()


def whole(x, weight):
    return (x @ weight).relu()


def waste(device):
    x, weight = parts(device)
    layer = torch.compile(broken)

    def step():
        out = x
        for _ in range(LAYERS):
            out = layer(out, weight)
        return out

    return step


def clean(device):
    x, weight = parts(device)

    @torch.compile(fullgraph=True)
    def step():
        out = x
        for _ in range(LAYERS):
            out = whole(out, weight)
        return out

    return step
