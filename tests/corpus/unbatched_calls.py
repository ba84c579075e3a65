"""Classifier-free guidance: a denoiser runs once with the label and once without it, on the same picture."""

import torch
from torch import nn

RULE = "unbatched-calls"
DEVICES = ("cuda",)


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.labels = nn.Embedding(11, width)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(12)])

    def forward(self, x, labels):
        return self.layers(x + self.labels(labels))


def parts(device):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    width = 8192 if device == "cuda" else 1024
    model = Denoiser(width).to(device, dtype).eval()
    x = torch.randn(64, width, device=device, dtype=dtype)
    return model, x, torch.randint(10, (64,), device=device), torch.full((64,), 10, device=device)


def waste(device):
    model, x, labels, nothing = parts(device)

    @torch.inference_mode()
    def step():
        wanted = model(x, labels)  # waste
        free = model(x, nothing)
        return torch.lerp(free, wanted, 4.0).mul_(-0.1).add_(x)

    return step


def clean(device):
    model, x, labels, nothing = parts(device)
    both = torch.cat([labels, nothing])

    @torch.inference_mode()
    def step():
        wanted, free = model(torch.cat([x, x]), both).chunk(2)
        return torch.lerp(free, wanted, 4.0).mul_(-0.1).add_(x)

    return step
