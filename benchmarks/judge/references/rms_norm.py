"""RMSNorm with a weight."""

import torch

INPUTS = ("inputs", "float16", "bfloat16", "float64")
SIZES = (
    {"rows": 512, "columns": 1024},
    {"rows": 100, "columns": 768},
    {"rows": 33, "columns": 1001},
)


def rms_norm(x, weight):
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.to(wide.dtype)).to(x.dtype)


def inputs(rows=512, columns=1024):
    return torch.randn(rows, columns), torch.randn(columns)


def float16(rows=512, columns=1024):
    return tuple(tensor.half() for tensor in inputs(rows, columns))


def bfloat16(rows=512, columns=1024):
    return tuple(tensor.bfloat16() for tensor in inputs(rows, columns))


def float64(rows=512, columns=1024):
    return tuple(tensor.double() for tensor in inputs(rows, columns))
