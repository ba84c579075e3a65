"""Running sums of each row."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 256, "columns": 512},
    {"rows": 33, "columns": 100},
)


def cumulative_sum(x):
    return torch.cumsum(x, -1)


def inputs(rows=256, columns=512):
    return (torch.randn(rows, columns),)


def float16(rows=256, columns=512):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=256, columns=512):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=256, columns=512):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
