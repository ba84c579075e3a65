"""The largest element of each row."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 1024},
    {"rows": 31, "columns": 65},
)


def row_max(x):
    return x.amax(-1)


def inputs(rows=512, columns=1024):
    return (torch.randn(rows, columns),)


def float16(rows=512, columns=1024):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=1024):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=1024):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
