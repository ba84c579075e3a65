"""A sampler encodes the same text again in every step."""

import torch

RULE = "computed-every-step"
DEVICES = ("cpu", "cuda")


def inputs(device):
    size, rows, dtype = (4096, 4096, torch.bfloat16) if device == "cuda" else (512, 512, torch.float32)
    text, sound = (torch.randn(rows, size, device=device, dtype=dtype) for _ in range(2))
    weights = [torch.randn(size, size, device=device, dtype=dtype) / size**0.5 for _ in range(3)]
    return text, sound, weights


def encode(text, weights):
    return ((text @ weights[0]).relu_() @ weights[1]).tanh()


def waste(device):
    text, sound, weights = inputs(device)

    def step():
        nonlocal sound
        encoded = encode(text, weights)  # waste
        sound = torch.addmm(encoded, sound, weights[2])

    return torch.no_grad()(step)


def clean(device):
    text, sound, weights = inputs(device)
    encoded = encode(text, weights)

    def step():
        nonlocal sound
        sound = torch.addmm(encoded, sound, weights[2])

    return torch.no_grad()(step)
