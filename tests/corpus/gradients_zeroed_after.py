"""Gradients are filled with zeros after each step, one by one, and the new ones added to the zeros."""

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
        net(x).backward(gradient)
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad.zero_()  # waste

    return step


def clean(device):
    net, x, gradient = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, fused=True)

    def step():
        net(x).backward(gradient)
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None

    return step
