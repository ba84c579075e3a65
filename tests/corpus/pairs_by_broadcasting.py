"""Rows are quantized to the nearest entry of a codebook; the differences to all entries are written."""

import torch

RULE = "pairs-by-broadcasting"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, codes, width = (16_384, 1024, 64) if device == "cuda" else (512, 256, 64)
    return torch.randn(rows, width, device=device), torch.randn(codes, width, device=device)


def waste(device):
    rows, codes = inputs(device)

    def step():
        with torch.no_grad():
            distances = (rows.unsqueeze(1) - codes.unsqueeze(0)).pow(2).sum(dim=2)  # waste
            return codes[distances.argmin(dim=1)]

    return step


def clean(device):
    rows, codes = inputs(device)

    def step():
        with torch.no_grad():
            return codes[torch.cdist(rows, codes).argmin(dim=1)]

    return step
