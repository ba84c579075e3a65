"""Softmax over the last dimension."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 2048},
    {"rows": 64, "columns": 1000},
    {"rows": 1024, "columns": 257},
)


def softmax(x):
    return torch.softmax(x, -1)


def inputs(rows=512, columns=2048):
    return (torch.randn(rows, columns),)


def float16(rows=512, columns=2048):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=2048):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=2048):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
