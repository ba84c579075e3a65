"""Softmax over the last dimension."""

import torch


def softmax(x):
    return torch.softmax(x, -1)


def inputs(rows=512, columns=2048):
    return (torch.randn(rows, columns),)
