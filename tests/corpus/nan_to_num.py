"""A new buffer is cleaned of NaNs where it should be filled."""

import torch

RULE = "nan-to-num-for-fill"
DEVICES = ("cpu", "cuda")


def inputs(device):
    rows, size = (128 * 4096, 1536) if device == "cuda" else (8192, 512)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(rows // 8, size, device=device, dtype=dtype), rows


def waste(device):
    x, rows = inputs(device)

    def step():
        padded = x.new_empty(rows, x.shape[-1])
        padded.nan_to_num_(0.0, 0.0, 0.0)  # waste
        padded[: len(x)] = x
        return padded

    return step


def clean(device):
    x, rows = inputs(device)

    def step():
        padded = x.new_zeros(rows, x.shape[-1])
        padded[: len(x)] = x
        return padded

    return step
