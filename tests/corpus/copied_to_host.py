"""Results go to the host after each layer, and the host waits for each of them."""

import torch

RULE = "synchronization"
DEVICES = ("cuda",)
LAYERS = 32


def inputs(device):
    rows, size = (2048, 8192) if device == "cuda" else (64, 64)
    return torch.randn(rows, size, dtype=torch.bfloat16, device=device)


def waste(device):
    start = inputs(device)

    def step():
        x, log = start, []
        for _ in range(LAYERS):
            x = x.softmax(-1)
            log.append(x[0].cpu())  # waste
        return x, log

    return step


def clean(device):
    start = inputs(device)
    log = torch.empty(LAYERS, start.shape[1], dtype=start.dtype, pin_memory=device == "cuda")

    def step():
        x = start
        for layer in range(LAYERS):
            x = x.softmax(-1)
            log[layer].copy_(x[0], non_blocking=True)
        return x, log

    return step
