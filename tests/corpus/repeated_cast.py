"""A weight that is kept in one dtype is cast at each of its uses."""

import torch

RULE = "repeated-cast"
DEVICES = ("cpu", "cuda")


def inputs(device):
    if device == "cuda":
        size, rows, stored, dtype = 8192, (512, 256), torch.float32, torch.bfloat16
    else:
        size, rows, stored, dtype = 1536, (64, 32), torch.float16, torch.float32
    weight = torch.randn(size, size, device=device, dtype=stored)
    return weight, [torch.randn(count, size, device=device, dtype=dtype) for count in rows]


def waste(device):
    weight, (one, other) = inputs(device)

    def step():
        return one @ weight.to(one.dtype), other @ weight.to(one.dtype)  # waste

    return step


def clean(device):
    weight, (one, other) = inputs(device)

    def step():
        cast = weight.to(one.dtype)
        return one @ cast, other @ cast

    return step
