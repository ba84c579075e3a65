"""Causal attention in inference, with a triangle that is laid over the scores."""

import torch
from torch.nn import functional

RULE = "attention-written-out"
DEVICES = ("cpu", "cuda")


def inputs(device):
    shape, dtype = ((8, 16, 2048, 128), torch.bfloat16) if device == "cuda" else ((1, 8, 512, 64), torch.float32)
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]


def waste(device):
    query, key, value = inputs(device)

    def step():
        length = query.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(future, float("-inf"))
        return scores.float().softmax(-1).to(value.dtype) @ value  # waste

    return step


def clean(device):
    query, key, value = inputs(device)

    def step():
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return step
