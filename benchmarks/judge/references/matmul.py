"""A matrix product with a fused bias and GELU."""

import torch


def matmul(a, b, bias):
    return torch.nn.functional.gelu(a @ b + bias)


def inputs(m=256, n=256, k=512):
    return torch.randn(m, k), torch.randn(k, n) / k**0.5, torch.randn(n)
