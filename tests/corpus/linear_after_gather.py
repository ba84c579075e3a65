"""Messages of a graph: a linear layer on the gathered features of both ends of each edge."""

import torch

RULE = "linear-after-gather"
DEVICES = ("cpu", "cuda")


def inputs(device):
    nodes, near, size, dtype = (8192, 16, 512, torch.bfloat16) if device == "cuda" else (512, 16, 96, torch.float32)
    x = torch.randn(nodes, size, device=device, dtype=dtype)
    neighbours = torch.randint(nodes, (nodes, near), device=device)
    return x, neighbours, torch.randn(size, 2 * size, device=device, dtype=dtype) / size**0.5


def waste(device):
    x, neighbours, weight = inputs(device)

    def step():
        pairs = torch.cat([x[:, None].expand(*neighbours.shape, -1), x[neighbours]], dim=-1)
        return torch.nn.functional.linear(pairs, weight).sum(1)  # waste

    return step


def clean(device):
    x, neighbours, weight = inputs(device)

    def step():
        own, other = torch.nn.functional.linear(x, weight.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)).chunk(
            2, -1
        )
        return own * neighbours.shape[1] + other[neighbours].sum(1)

    return step
