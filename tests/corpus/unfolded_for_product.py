"""A convolution by hand: windows are unfolded, and a product mixes their elements."""

import torch
from torch.nn import functional

RULE = "unfolded-for-product"
DEVICES = ("cpu", "cuda")


def inputs(device):
    images, channels, side = (128, 128, 64) if device == "cuda" else (2, 16, 48)
    x = torch.randn(images, channels, side, side, device=device)
    return x, torch.randn(channels, channels * 9, device=device)


def waste(device):
    x, weight = inputs(device)

    def step():
        with torch.no_grad():
            windows = functional.unfold(x, 3, padding=1)  # waste
            return (weight @ windows).view(x.shape)

    return step


def clean(device):
    x, weight = inputs(device)
    x = x.contiguous(memory_format=torch.channels_last)
    kernel = weight.view(-1, x.shape[1], 3, 3).contiguous(memory_format=torch.channels_last)

    def step():
        with torch.no_grad():
            return functional.conv2d(x, kernel, padding=1)

    return step
