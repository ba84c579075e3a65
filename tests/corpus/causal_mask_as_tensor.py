"""A causal mask is given to attention as a tensor."""

import torch
from torch.nn import functional

RULE = "slow-attention-backend"
DEVICES = ("cuda",)


def inputs(device):
    shape = (4, 16, 4096, 128)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]


def waste(device):
    query, key, value, gradient = inputs(device)

    def step():
        size = query.shape[-2]
        mask = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # waste
        return torch.autograd.grad(out, (query, key, value), gradient)

    return step


def clean(device):
    query, key, value, gradient = inputs(device)

    def step():
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, (query, key, value), gradient)

    return step
