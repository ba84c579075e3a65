"""A cache of keys and values is read in its whole length, with a mask for the slots that are empty."""

import torch
from torch.nn import functional

RULE = "masked-keys"
DEVICES = ("cpu", "cuda")


def inputs(device):
    batch, heads, length, used, width = (64, 32, 4096, 1024, 128) if device == "cuda" else (4, 16, 2048, 256, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache = torch.randn(2, batch, heads, length, width, device=device, dtype=dtype)
    shown = torch.arange(length, device=device)[None] < used
    return cache, torch.randn(3, batch, heads, 1, width, device=device, dtype=dtype), shown, used


def waste(device):
    cache, (query, *new), shown, used = inputs(device)

    def step():
        with torch.no_grad():
            for part, added in zip(cache, new, strict=True):
                part[:, :, used - 1 : used] = added
            keys, values = cache  # waste
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=shown)

    return step


def clean(device):
    cache, (query, *new), shown, used = inputs(device)

    def step():
        with torch.no_grad():
            for part, added in zip(cache, new, strict=True):
                part[:, :, used - 1 : used] = added
            keys, values = cache[:, :, :, :used]
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=shown[:, :used])

    return step
