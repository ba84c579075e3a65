"""LayerNorm with weight and bias."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 1024},
    {"rows": 64, "columns": 999},
)


def layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


def inputs(rows=512, columns=1024):
    return torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)


def float16(rows=512, columns=1024):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=1024):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=1024):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
