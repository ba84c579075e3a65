"""Causal attention, as written in papers."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"heads": 4, "length": 256, "width": 64},
    {"heads": 2, "length": 100, "width": 64},
)


def attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def inputs(heads=4, length=256, width=64):
    return (
        torch.randn(2, heads, length, width),
        torch.randn(2, heads, length, width),
        torch.randn(2, heads, length, width),
    )


def float16(heads=4, length=256, width=64):
    return tuple(tensor.half() for tensor in inputs(heads, length, width))


def bfloat16(heads=4, length=256, width=64):
    return tuple(tensor.bfloat16() for tensor in inputs(heads, length, width))


def float64(heads=4, length=256, width=64):
    return tuple(tensor.double() for tensor in inputs(heads, length, width))
