"""Queries, keys and values are made contiguous before attention, which reads them through strides."""

import torch
from torch.nn import functional

RULE = "copied-for-layout"
DEVICES = ("cpu", "cuda")


def inputs(device):
    shape = (32, 1024, 3, 16, 128) if device == "cuda" else (16, 128, 3, 8, 64)
    return torch.randn(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def waste(device):
    packed = inputs(device)

    def step():
        query, key, value = (part.transpose(1, 2).contiguous() for part in packed.unbind(2))  # waste
        return functional.scaled_dot_product_attention(query, key, value)

    return step


def clean(device):
    packed = inputs(device)

    def step():
        query, key, value = (part.transpose(1, 2) for part in packed.unbind(2))
        return functional.scaled_dot_product_attention(query, key, value)

    return step
