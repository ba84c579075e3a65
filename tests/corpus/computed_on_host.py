"""Images are converted by the processor before they go to the device."""

import torch

RULE = "computed-on-host"
DEVICES = ("cuda",)


def inputs(device):
    size = 4096 if device == "cuda" else 64
    images = torch.randint(0, 256, (size, size), dtype=torch.uint8)
    images = images.pin_memory() if device == "cuda" else images
    return images, torch.randn(size, size, device=device) / size**0.5


def waste(device):
    images, weight = inputs(device)

    def step():
        floats = images.float().div_(255).sub_(0.5)
        return floats.to(device) @ weight  # waste

    return step


def clean(device):
    images, weight = inputs(device)

    def step():
        return images.to(device, non_blocking=True).float().div_(255).sub_(0.5) @ weight

    return step
