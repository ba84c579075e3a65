"""Attention is told to use FlashAttention-2 on a GPU for which cuDNN has faster kernels."""

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

RULE = "slow-attention-backend"
DEVICES = ("cuda",)


def inputs(device):
    shape = (4, 16, 4096, 128)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]


def waste(device):
    query, key, value, gradient = inputs(device)

    def step():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)  # waste
        return torch.autograd.grad(out, (query, key, value), gradient)

    return step


def clean(device):
    query, key, value, gradient = inputs(device)

    def step():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, (query, key, value), gradient)

    return step
