"""A matrix product with its epilogue in cuBLAS, and GELU after it."""

import torch


def matmul(a, b, bias):
    return torch.nn.functional.gelu(torch.addmm(bias, a, b))
