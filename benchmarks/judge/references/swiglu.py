"""The gated activation silu(gate) * up."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 1024},
    {"rows": 77, "columns": 333},
)


def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def inputs(rows=512, columns=1024):
    return torch.randn(rows, columns), torch.randn(rows, columns)


def float16(rows=512, columns=1024):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=1024):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=1024):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
