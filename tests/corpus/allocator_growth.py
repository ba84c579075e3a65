"""The cache of the allocator is emptied in the step, which then asks the driver for the same memory again.

No line is named: the driver is called at the softmaxes, and the cause is the call between them.
"""

import torch

RULE = "allocator-growth"
DEVICES = ("cuda",)


def parts(device):
    return torch.randn(8192, 16384, device=device, dtype=torch.bfloat16)


def waste(device):
    x = parts(device)

    def step():
        out = x
        for _ in range(8):
            out = out.softmax(-1)
            torch.cuda.empty_cache()
        return out

    return step


def clean(device):
    x = parts(device)

    def step():
        out = x
        for _ in range(8):
            out = out.softmax(-1)
        return out

    return step
