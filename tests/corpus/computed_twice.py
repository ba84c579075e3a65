"""Two heads each compute the same hidden layer from the same input."""

import torch

RULE = "computed-twice"
DEVICES = ("cpu", "cuda")


def inputs(device):
    size, rows, dtype = (4096, 8192, torch.bfloat16) if device == "cuda" else (512, 512, torch.float32)
    x, hidden, one, other = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((rows, size), (size, size), (size, size // 2), (size, size))
    )
    return x, *(weight.requires_grad_() for weight in (hidden, one, other))


def waste(device):
    x, hidden, one, other = inputs(device)

    def features():
        return x @ hidden  # waste

    def step():
        results = features() @ one, features() @ other
        return torch.autograd.grad(results, (hidden, one, other), [result.detach() for result in results])

    return step


def clean(device):
    x, hidden, one, other = inputs(device)

    def step():
        features = x @ hidden
        results = features @ one, features @ other
        return torch.autograd.grad(results, (hidden, one, other), [result.detach() for result in results])

    return step
