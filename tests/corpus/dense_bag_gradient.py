"""Bags of rows of a large table get a dense gradient, and an optimizer that goes over all of the table."""

import torch

RULE = "dense-embedding-gradient"
DEVICES = ("cpu", "cuda")
RATE = 1e-2


def parts(device, *, sparse):
    rows, width, bags, rest = (4_000_000, 128, 1024, 2**30) if device == "cuda" else (100_000, 32, 32, 2**16)
    table = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse, device=device)  # waste
    ids = torch.randint(rows, (bags, 8), device=device)
    return table, torch.optim.SGD(table.parameters(), lr=RATE), ids, torch.zeros(rest, device=device)


def training(device, *, sparse):
    table, optimizer, ids, rest = parts(device, sparse=sparse)
    gradient = torch.randn(len(ids), table.embedding_dim, device=device)

    def step():
        rest.neg_()
        bags = table(ids)
        bags.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return training(device, sparse=False)


def clean(device):
    return training(device, sparse=True)
