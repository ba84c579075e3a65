"""The logits of a language model are cast to float32 for the loss."""

import torch
from torch.nn import functional

RULE = "logits-upcast"
DEVICES = ("cpu", "cuda")


def build(device, loss_of):
    rows, width, words = (8192, 1024, 32768) if device == "cuda" else (32, 4, 8192)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    hidden = torch.randn(rows, width, device=device, dtype=dtype)
    weight = torch.randn(words, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(words, (rows,), device=device)

    def step():
        loss = loss_of(functional.linear(hidden, weight), targets)
        loss.backward()
        weight.grad = None
        return loss.detach()

    return step


def waste(device):
    def loss_of(logits, targets):
        return functional.cross_entropy(logits.float(), targets)  # waste

    return build(device, loss_of)


def clean(device):
    return build(device, functional.cross_entropy)
