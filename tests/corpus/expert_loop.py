"""Experts of a layer run in a Python loop that looks for the rows of each, and waits for their number."""

import torch
from torch.nn import functional

RULE = "expert-loop"
DEVICES = ("cuda",)
EXPERTS = 32


def parts(device):
    rows, width, inner = (16384, 1024, 2048) if device == "cuda" else (64, 16, 32)
    dtype = torch.bfloat16
    x = torch.randn(rows, width, device=device, dtype=dtype)
    up = torch.randn(EXPERTS, width, inner, device=device, dtype=dtype) * width**-0.5
    down = torch.randn(EXPERTS, inner, width, device=device, dtype=dtype) * inner**-0.5
    return x, up, down, torch.randint(EXPERTS, (rows,), device=device)


def waste(device):
    x, up, down, expert_of_row = parts(device)

    def step():
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            (rows,) = torch.where(expert_of_row == expert)  # waste
            out.index_add_(0, rows, functional.silu(x[rows] @ up[expert]) @ down[expert])
        return out

    return step


def clean(device):
    x, up, down, expert_of_row = parts(device)
    numbers = torch.arange(EXPERTS, device=device)

    def step():
        of_row, order = expert_of_row.sort()
        ends = torch.searchsorted(of_row, numbers, right=True, out_int32=True)
        inner = functional.silu(torch._grouped_mm(x[order], up, offs=ends))
        return torch.empty_like(x).index_copy_(0, order, torch._grouped_mm(inner, down, offs=ends))

    return step
