"""A number that is the same in all steps is computed in each, element by element in Python."""

import torch

RULE = "python-stretch"
DEVICES = ("cpu", "cuda")
LENGTH = 60_000


def parts(device):
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    return torch.randn(size, size, device=device, dtype=dtype)


def mean(numbers):
    return sum(min(number * 0.5 + 1.0, 40.0) for number in numbers) / len(numbers)


def waste(device):
    weight = parts(device)
    numbers = [float(number % 97) for number in range(LENGTH)]

    def step():
        out = weight @ weight
        return out.sum() * mean(numbers)  # waste

    return step


def clean(device):
    weight = parts(device)
    scale = mean([float(number % 97) for number in range(LENGTH)])

    def step():
        out = weight @ weight
        return out.sum() * scale

    return step
