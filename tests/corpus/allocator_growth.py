"""The cache of the allocator is emptied in the step, which then asks the driver for the same memory again.

No line is named: the driver is called at the products, and the cause is the call between them.
"""

import torch

RULE = "allocator-growth"
DEVICES = ("cuda",)


def parts(device):
    weight = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) / 64
    return torch.randn(16384, 4096, device=device, dtype=torch.bfloat16), weight


def waste(device):
    x, weight = parts(device)

    def step():
        out = x
        for _ in range(4):
            out = out @ weight
            torch.cuda.empty_cache()
        return out

    return step


def clean(device):
    x, weight = parts(device)

    def step():
        out = x
        for _ in range(4):
            out = out @ weight
        return out

    return step
