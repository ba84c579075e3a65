"""A large table, of which a step uses few rows, gets a dense gradient and an optimizer that goes over all of it."""

import torch

RULE = "dense-embedding-gradient"
DEVICES = ("cpu", "cuda")


def sizes(device):
    return (1_000_000, 256, 8192) if device == "cuda" else (100_000, 32, 256)


def waste(device):
    rows, width, used = sizes(device)
    table = torch.nn.Embedding(rows, width, device=device)
    optimizer = torch.optim.Adam(table.parameters(), fused=True)
    ids, gradient = torch.randint(rows, (used,), device=device), torch.randn(used, width, device=device)

    def step():
        found = table(ids)  # waste
        found.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean(device):
    rows, width, used = sizes(device)
    table = torch.nn.Embedding(rows, width, device=device, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    ids, gradient = torch.randint(rows, (used,), device=device), torch.randn(used, width, device=device)

    def step():
        found = table(ids)
        found.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step
