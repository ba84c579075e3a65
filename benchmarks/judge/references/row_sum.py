"""The mean of squares of each row."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 4096},
    {"rows": 100, "columns": 777},
)


def row_sum(x):
    return (x * x).mean(-1)


def inputs(rows=512, columns=4096):
    return (torch.randn(rows, columns),)


def float16(rows=512, columns=4096):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=4096):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=4096):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
