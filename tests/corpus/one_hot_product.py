"""Categories become one-hot vectors, whose product with a matrix selects its rows."""

import torch
from torch.nn import functional

RULE = "one-hot-product"
DEVICES = ("cpu", "cuda")


def built(device):
    torch.manual_seed(0)
    rows, categories, width = (8192, 20_000, 512) if device == "cuda" else (256, 4000, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weight = torch.nn.Parameter(torch.randn(categories, width, device=device, dtype=dtype))
    head = torch.randn(width, width, device=device, dtype=dtype)
    return torch.randint(categories, (rows,), device=device), weight, head


def waste(device):
    ids, weight, head = built(device)

    def step():
        with torch.no_grad():
            vectors = torch.zeros(len(ids), len(weight), device=ids.device, dtype=weight.dtype)
            vectors.scatter_(1, ids[:, None], 1)
            return vectors @ weight @ head  # waste

    return step


def clean(device):
    ids, weight, head = built(device)

    def step():
        with torch.no_grad():
            return functional.embedding(ids, weight) @ head

    return step
