"""A matrix product."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"m": 256, "n": 256, "k": 1024},
    {"m": 65, "n": 130, "k": 300},
)


def product(a, b):
    return a @ b


def inputs(m=256, n=256, k=1024):
    return torch.randn(m, k), torch.randn(k, n)


def float16(m=256, n=256, k=1024):
    return tuple(tensor.half() for tensor in inputs(m, n, k))


def bfloat16(m=256, n=256, k=1024):
    return tuple(tensor.bfloat16() for tensor in inputs(m, n, k))


def float64(m=256, n=256, k=1024):
    return tuple(tensor.double() for tensor in inputs(m, n, k))
