"""A large table, of which a step uses few rows, gets a dense gradient and an optimizer that goes over all of it."""

import torch

RULE = "dense-embedding-gradient"
DEVICES = ("cpu", "cuda")
RATE = 1e-3


def parts(device):
    """A table, what is looked up in it, the gradient of that, and what stands for the rest of the model."""
    rows, width, used, rest = (4_000_000, 256, 8192, 2**31) if device == "cuda" else (100_000, 32, 256, 2**16)
    table = torch.nn.Embedding(rows, width, device=device)  # waste
    ids, gradient = torch.randint(rows, (used,), device=device), torch.randn(used, width, device=device)
    return table, ids, gradient, torch.zeros(rest, device=device)


def waste(device):
    table, ids, gradient, rest = parts(device)
    optimizer = torch.optim.SGD(table.parameters(), lr=RATE, fused=True)

    def step():
        rest.neg_()
        found = table(ids)
        found.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean(device):
    table, ids, gradient, rest = parts(device)
    table.requires_grad_(False)

    def step():
        rest.neg_()
        found = table(ids).requires_grad_()
        found.backward(gradient)
        table.weight.index_add_(0, ids, found.grad, alpha=-RATE)

    return step
