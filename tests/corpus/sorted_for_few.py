"""All items are sorted by their scores, and the best ten are shown."""

import torch

RULE = "sorted-for-few"
DEVICES = ("cpu", "cuda")


def inputs(device):
    users, width, items = (1024, 128, 100_000) if device == "cuda" else (16, 32, 50_000)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(users, width, device=device, dtype=dtype), torch.randn(width, items, device=device, dtype=dtype)


def waste(device):
    users, items = inputs(device)

    def step():
        with torch.no_grad():
            return torch.argsort(users @ items, dim=-1, descending=True)[:, :10].clone()  # waste

    return step


def clean(device):
    users, items = inputs(device)

    def step():
        with torch.no_grad():
            return (users @ items).topk(10, dim=-1).indices

    return step
