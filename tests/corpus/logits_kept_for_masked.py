"""A model is trained on a few masked tokens, and has logits of all of them."""

import torch
from torch.nn import functional

RULE = "logits-kept"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, width, words = (16384, 1024, 32768) if device == "cuda" else (256, 128, 2048)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    head = torch.randn(words, width, device=device, dtype=dtype, requires_grad=True)
    chosen = torch.arange(rows // 8, device=device) * 8
    targets = torch.randint(words, (rows // 8,), device=device)
    return hidden, head, chosen, targets


def waste(device):
    hidden, head, chosen, targets = inputs(device)

    def step():
        logits = functional.linear(hidden, head)  # waste
        loss = functional.cross_entropy(logits[chosen], targets)
        return torch.autograd.grad(loss, (hidden, head))

    return step


def clean(device):
    hidden, head, chosen, targets = inputs(device)

    def step():
        logits = functional.linear(hidden[chosen], head)
        loss = functional.cross_entropy(logits, targets)
        return torch.autograd.grad(loss, (hidden, head))

    return step
