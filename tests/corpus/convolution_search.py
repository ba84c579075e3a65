"""cuDNN searches for the fastest algorithms of convolutions in each step, whose images have a new size."""

import itertools

import torch

RULE = "convolution-search"
DEVICES = ("cuda",)
BATCH, CHANNELS = 8, 128


def built(device):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(6)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16).to(memory_format=torch.channels_last).eval()
    return model, torch.randn(BATCH, CHANNELS, 8, 8, device=device, dtype=torch.bfloat16)


def stepping(device, sizes):
    model, seed = built(device)
    torch.backends.cudnn.benchmark = True  # waste

    def step():
        size = next(sizes)
        images = seed.new_ones(BATCH, CHANNELS, size, size).to(memory_format=torch.channels_last)
        with torch.no_grad():
            return model(images)

    return step


def waste(device):
    return stepping(device, itertools.count(64))


def clean(device):
    return stepping(device, itertools.repeat(192))
