"""Causal attention is written as product, mask, softmax and product, and trained through."""

import math

import torch
from torch.nn import functional

RULE = "attention-written-out"
DEVICES = ("cpu", "cuda")


def inputs(device):
    batch, heads, tokens, width = (16, 16, 2048, 64) if device == "cuda" else (1, 4, 512, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (batch, heads, tokens, width)
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def waste(device):
    query, key, value = inputs(device)
    tokens, width = query.shape[-2:]

    def step():
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width)
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)  # waste
        (weights @ value).backward(value.detach())

    return step


def clean(device):
    query, key, value = inputs(device)

    def step():
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.backward(value.detach())

    return step
