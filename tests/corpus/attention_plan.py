"""Attention gets one key more in each step, and cuDNN plans it for each length anew."""

import itertools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

RULE = "attention-plan"
DEVICES = ("cuda",)
BATCH, HEADS, WIDTH = 16, 16, 128


def stepping(device, backend):
    torch.manual_seed(0)
    longest, dtype = (16384, torch.bfloat16) if device == "cuda" else (64, torch.float32)
    keys, values = torch.randn(2, BATCH, HEADS, longest, WIDTH, device=device, dtype=dtype)
    query = torch.randn(BATCH, HEADS, 1, WIDTH, device=device, dtype=dtype)
    lengths = itertools.count(longest // 2)

    @torch.inference_mode()
    def step():
        length = next(lengths)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys[:, :, :length], values[:, :, :length])  # waste

    return step


def waste(device):
    return stepping(device, SDPBackend.CUDNN_ATTENTION)


def clean(device):
    return stepping(device, SDPBackend.FLASH_ATTENTION)
