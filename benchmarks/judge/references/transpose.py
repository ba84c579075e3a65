"""A transposed copy."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 768},
    {"rows": 33, "columns": 70},
)


def transpose(x):
    return x.transpose(-1, -2).contiguous()


def inputs(rows=512, columns=768):
    return (torch.randn(rows, columns),)


def float16(rows=512, columns=768):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=768):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=768):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
