"""A matrix product with a bias and GELU as its epilogue."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"m": 256, "n": 256, "k": 512},
    {"m": 100, "n": 320, "k": 200},
)


def matmul(a, b, bias):
    return torch.nn.functional.gelu(a @ b + bias)


def inputs(m=256, n=256, k=512):
    return torch.randn(m, k), torch.randn(k, n) / max(k, 1) ** 0.5, torch.randn(n)


def float16(m=256, n=256, k=512):
    return tuple(tensor.half() for tensor in inputs(m, n, k))


def bfloat16(m=256, n=256, k=512):
    return tuple(tensor.bfloat16() for tensor in inputs(m, n, k))


def float64(m=256, n=256, k=512):
    return tuple(tensor.double() for tensor in inputs(m, n, k))
