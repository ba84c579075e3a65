"""The next word of a text is found from the logits of all positions."""

import torch
from torch.nn import functional

RULE = "logits-kept"
DEVICES = ("cpu", "cuda")


def inputs(device):
    shape, words = ((8, 16, 2048, 128), 32768) if device == "cuda" else ((2, 2, 64, 64), 4096)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch, heads, tokens, width = shape
    hidden = torch.randn(batch, tokens, heads, width, device=device, dtype=dtype).transpose(1, 2)
    head = torch.randn(heads * width, words, device=device, dtype=dtype)
    return hidden, head


def mixed(hidden):
    out = functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def waste(device):
    hidden, head = inputs(device)

    def step():
        logits = mixed(hidden) @ head  # waste
        return logits[:, -1].argmax(-1)

    return step


def clean(device):
    hidden, head = inputs(device)

    def step():
        logits = mixed(hidden)[:, -1] @ head
        return logits.argmax(-1)

    return step
