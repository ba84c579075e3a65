"""A batch goes to the device from memory that is not pinned."""

import torch

RULE = "pageable-copy"
DEVICES = ("cuda",)


def inputs(device):
    size = 8192 if device == "cuda" else 64
    batch = torch.randn(size, size, dtype=torch.bfloat16)
    return batch, torch.randn(size, size, dtype=torch.bfloat16, device=device) / size**0.5


def waste(device):
    batch, weight = inputs(device)

    def step():
        return batch.to(device) @ weight  # waste

    return step


def clean(device):
    batch, weight = inputs(device)
    batch = batch.pin_memory() if device == "cuda" else batch

    def step():
        return batch.to(device, non_blocking=True) @ weight

    return step
