"""Linear attention that multiplies queries and keys first, as if there were a softmax between."""

import torch

RULE = "product-order"
DEVICES = ("cpu", "cuda")


def inputs(device):
    heads, length, width = (128, 2048, 64) if device == "cuda" else (4, 768, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(heads, length, width, device=device, dtype=dtype) for _ in range(3)]


def waste(device):
    query, key, value = inputs(device)

    def step():
        with torch.no_grad():
            scores = query @ key.mT  # waste
            return scores @ value

    return step


def clean(device):
    query, key, value = inputs(device)

    def step():
        with torch.no_grad():
            return query @ (key.mT @ value)

    return step
