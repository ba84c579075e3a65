"""Images and weights are channels-first, and each convolution converts them."""

import torch

RULE = "channels-first"
DEVICES = ("cpu", "cuda")


class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = torch.nn.BatchNorm2d(channels)
        self.second = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = torch.nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.first_norm(self.first(x)).relu()
        return (x + self.second_norm(self.second(y))).relu()


def built(device, layout):
    torch.manual_seed(0)
    channels, batch, size = (256, 64, 56) if device == "cuda" else (32, 8, 56)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = torch.nn.Sequential(*(Block(channels) for _ in range(3))).to(device, dtype).eval()
    images = torch.randn(batch, channels, size, size, device=device, dtype=dtype)
    return model.to(memory_format=layout), images.to(memory_format=layout)


def stepping(device, layout):
    model, images = built(device, layout)

    def step():
        with torch.no_grad():
            return model(images)

    return step


def waste(device):
    return stepping(device, torch.contiguous_format)


def clean(device):
    return stepping(device, torch.channels_last)
