"""A number that changes from step to step is a constant of the compiled code, which is made anew for each.

No line is to blame: what compiles is the step as a whole.
"""

import itertools

import torch

RULE = "compilation"
DEVICES = ("cpu", "cuda")


def parts(device):
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    return torch.randn(size, size, device=device, dtype=dtype)


def scaled(x, scale):
    return (x @ x) * scale


def waste(device):
    x = parts(device)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10000
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    numbers = itertools.count(1)

    def step():
        return compiled(x, next(numbers))

    return step


def clean(device):
    x = parts(device)
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    numbers = itertools.count(1)

    def step():
        return compiled(x, torch.tensor(float(next(numbers))))

    return step
