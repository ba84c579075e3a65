"""The logarithm of softmax."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 256, "columns": 2000},
    {"rows": 65, "columns": 129},
)


def log_softmax(x):
    return torch.log_softmax(x, -1)


def inputs(rows=256, columns=2000):
    return (torch.randn(rows, columns),)


def float16(rows=256, columns=2000):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=256, columns=2000):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=256, columns=2000):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
