"""Rotary embeddings are written with a rotated copy of queries and keys."""

import torch

RULE = "unfused-rotary"
DEVICES = ("cpu", "cuda")


def inputs(device):
    batch, heads, tokens, width = (4, 32, 4096, 128) if device == "cuda" else (1, 8, 512, 64)
    query, key = (torch.randn(batch, heads, tokens, width, device=device) for _ in range(2))
    angles = torch.outer(torch.arange(tokens, device=device), 10000 ** -torch.linspace(0, 1, width // 2, device=device))
    return query, key, angles


def waste(device):
    query, key, angles = inputs(device)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def rotated(x):
        left, right = x.chunk(2, dim=-1)
        return torch.cat((-right, left), dim=-1)

    def turn(x):
        return x * cos + rotated(x) * sin  # waste

    def step():
        return turn(query), turn(key)

    return step


def clean(device):
    query, key, angles = inputs(device)
    if device == "cuda":
        return compiled(query, key, angles)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turn(x):  # pairs of neighbors in place of halves: the same embedding in another order
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2)

    def step():
        return turn(query), turn(key)

    return step


def compiled(query, key, angles):
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    @torch.compile
    def turn(x):
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    def step():
        return turn(query), turn(key)

    return step
