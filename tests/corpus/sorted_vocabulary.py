"""Nucleus sampling sorts the whole vocabulary, of which the first thousand tokens have all the probability."""

import torch

RULE = "sorted-for-few"
DEVICES = ("cpu", "cuda")
TOP_P = 0.9
FEW = 1024


def inputs(device):
    torch.manual_seed(0)
    rows, width, vocabulary = (1024, 2048, 131072) if device == "cuda" else (16, 64, 65536)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, width, device=device, dtype=dtype)
    return hidden, torch.randn(vocabulary, width, device=device, dtype=dtype)


def waste(device):
    hidden, head = inputs(device)

    def step():
        with torch.no_grad():
            logits = torch.nn.functional.linear(hidden, head).float()
            ordered, tokens = torch.sort(logits, descending=True, dim=-1)  # waste
            likely = ordered.softmax(dim=-1)
            removed = likely.cumsum(dim=-1) - likely > TOP_P
            likely = likely.masked_fill(removed, 0.0)
            return tokens.gather(-1, likely.multinomial(1))

    return step


def clean(device):
    hidden, head = inputs(device)

    def step():
        with torch.no_grad():
            logits = torch.nn.functional.linear(hidden, head).float()
            ordered, tokens = logits.topk(FEW, dim=-1)
            likely = ordered.softmax(dim=-1)
            removed = likely.cumsum(dim=-1) - likely > TOP_P
            likely = likely.masked_fill(removed, 0.0)
            return tokens.gather(-1, likely.multinomial(1))

    return step
