"""A segmentation head enlarges its features to the size of the image, and mixes their channels there."""

import torch
from torch import nn
from torch.nn import functional

RULE = "enlarged-before-convolution"
DEVICES = ("cpu", "cuda")


def built(device):
    images, channels, classes, side = (16, 256, 21, 64) if device == "cuda" else (2, 64, 8, 32)
    head = nn.Conv2d(channels, classes, 1).to(device, memory_format=torch.channels_last)
    features = torch.randn(images, channels, side, side, device=device)
    return head, features.contiguous(memory_format=torch.channels_last)


def waste(device):
    head, features = built(device)

    def step():
        with torch.no_grad():
            x = functional.interpolate(features, scale_factor=4, mode="bilinear", align_corners=False)
            return head(x)  # waste

    return step


def clean(device):
    head, features = built(device)

    def step():
        with torch.no_grad():
            return functional.interpolate(head(features), scale_factor=4, mode="bilinear", align_corners=False)

    return step
