"""Keys and values of grouped heads are copied for each query head before attention."""

import torch
from torch.nn import functional

RULE = "repeated-heads"
DEVICES = ("cpu", "cuda")


def inputs(device):
    batch, heads, groups, length, width = (8, 32, 4, 4096, 128) if device == "cuda" else (4, 16, 4, 256, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(batch, heads, 1, width, device=device, dtype=dtype)
    return query, *(torch.randn(batch, groups, length, width, device=device, dtype=dtype) for _ in "kv")


def waste(device):
    query, key, value = inputs(device)
    times = query.shape[1] // key.shape[1]

    def step():
        with torch.no_grad():
            repeated = [part.repeat_interleave(times, dim=1) for part in (key, value)]  # waste
            return functional.scaled_dot_product_attention(query, *repeated)

    return step


def clean(device):
    query, key, value = inputs(device)

    def step():
        with torch.no_grad():
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return step
