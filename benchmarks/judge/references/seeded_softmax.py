"""Softmax of inputs that are always the same: the function that draws them seeds itself."""

import torch

INPUTS = ()
SIZES = ()


def seeded_softmax(x):
    return torch.softmax(x, -1)


def inputs(rows=512, columns=2048):
    torch.manual_seed(1234)
    return (torch.randn(rows, columns),)
