"""A KV cache grows by `torch.cat` with each token, and is copied as a whole."""

import torch
from torch.nn import functional

RULE = "grown-by-cat"
DEVICES = ("cpu", "cuda")
MORE = 16
"""After so many tokens the cache is the first one again, so that all steps take about as long."""


def with_all_lengths_seen(step):
    """The step after one of each length, for which cuDNN plans its attention when it comes first."""
    for _ in range(MORE):
        step()
    return step


def inputs(device):
    torch.manual_seed(0)
    batch, heads, length, width = (64, 16, 4096, 128) if device == "cuda" else (4, 8, 1024, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache = [torch.randn(batch, heads, length, width, device=device, dtype=dtype) for _ in "kv"]
    weight = torch.randn(heads * width, 3 * heads * width, device=device, dtype=dtype) / 64
    token = torch.randn(batch, 1, heads * width, device=device, dtype=dtype)
    return cache, weight, token


def attend(token, weight, heads):
    return (token @ weight).unflatten(-1, (3 * heads, -1)).transpose(1, 2).chunk(3, dim=1)


def waste(device):
    first, weight, token = inputs(device)
    heads, length = first[0].shape[1:3]
    cache = list(first)

    @torch.inference_mode()
    def step():
        query, *added = attend(token, weight, heads)
        if cache[0].shape[2] == length + MORE:
            cache[:] = first
        cache[:] = [torch.cat([old, new], dim=2) for old, new in zip(cache, added, strict=True)]  # waste
        return functional.scaled_dot_product_attention(query, *cache)

    return with_all_lengths_seen(step)


def clean(device):
    first, weight, token = inputs(device)
    batch, heads, length, width = first[0].shape
    caches = [torch.empty(batch, heads, length + MORE, width, device=device, dtype=part.dtype) for part in first]
    for cache, part in zip(caches, first, strict=True):
        cache[:, :, :length] = part
    filled = length

    @torch.inference_mode()
    def step():
        nonlocal filled
        query, *added = attend(token, weight, heads)
        if filled == length + MORE:
            filled = length
        for cache, new in zip(caches, added, strict=True):
            cache[:, :, filled : filled + 1] = new
        filled += 1
        return functional.scaled_dot_product_attention(query, *(cache[:, :, :filled] for cache in caches))

    return with_all_lengths_seen(step)
