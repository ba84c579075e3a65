"""All frames are resized, and then every eighth is used."""

import torch

RULE = "partly-used"
DEVICES = ("cpu", "cuda")


def frames(device):
    count, side = (1024, 512) if device == "cuda" else (64, 64)
    return torch.rand(count, 3, side, side, device=device)


def waste(device):
    video = frames(device)

    def step():
        small = torch.nn.functional.interpolate(video, scale_factor=0.75, mode="bilinear")  # waste
        return small[::8].clone()

    return step


def clean(device):
    video = frames(device)

    def step():
        small = torch.nn.functional.interpolate(video[::8], scale_factor=0.75, mode="bilinear")
        return small.sum()

    return step
