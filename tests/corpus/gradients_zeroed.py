"""Gradients are filled with zeros before each step, and the new ones added to the zeros."""

import torch

RULE = "gradients-zeroed"
DEVICES = ("cpu", "cuda")


def model(device):
    width, depth, batch = (4096, 8, 2048) if device == "cuda" else (1024, 4, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = [torch.nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(depth)]
    return torch.nn.Sequential(*layers), *torch.randn(2, batch, width, device=device, dtype=dtype)


def waste(device):
    net, x, gradient = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=False)  # waste
        net(x).backward(gradient)
        optimizer.step()

    return step


def clean(device):
    net, x, gradient = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, fused=True)

    def step():
        optimizer.zero_grad()
        net(x).backward(gradient)
        optimizer.step()

    return step
