"""Garbage is collected in each step, with many objects that live anyway."""

import gc

import torch

RULE = "garbage-collection"
DEVICES = ("cpu", "cuda")


def parts(device):
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    return [torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)]


def waste(device):
    x, weight = parts(device)
    index = [[str(number)] for number in range(200_000)]  # such as the entries of a dataset

    def step():
        out = x @ weight
        gc.collect()  # waste
        return out.relu(), len(index)

    return step


def clean(device):
    x, weight = parts(device)
    index = [[str(number)] for number in range(200_000)]

    def step():
        out = x @ weight
        return out.relu(), len(index)

    return step
