"""Probabilities of all classes are computed, and only the most likely class is wanted."""

import torch

RULE = "softmax-for-argmax"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, width, classes = (8192, 1024, 32768) if device == "cuda" else (256, 64, 16384)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, width, device=device, dtype=dtype)
    return x, torch.randn(classes, width, device=device, dtype=dtype)


def waste(device):
    x, weight = inputs(device)

    def step():
        with torch.no_grad():
            logits = torch.nn.functional.linear(x, weight)
            return torch.softmax(logits, dim=-1).argmax(dim=-1)  # waste

    return step


def clean(device):
    x, weight = inputs(device)

    def step():
        with torch.no_grad():
            logits = torch.nn.functional.linear(x, weight)
            return logits.argmax(dim=-1)

    return step
