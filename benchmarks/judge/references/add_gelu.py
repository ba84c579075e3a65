"""GELU of a sum."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 1024},
    {"rows": 31, "columns": 65},
)


def add_gelu(x, y):
    return torch.nn.functional.gelu(x + y)


def inputs(rows=512, columns=1024):
    return torch.randn(rows, columns), torch.randn(rows, columns)


def float16(rows=512, columns=1024):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=1024):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=1024):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
