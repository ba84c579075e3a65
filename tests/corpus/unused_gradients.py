"""A student learns from a frozen teacher, and the backward pass goes through the teacher too."""

import torch

RULE = "unused-gradients"
DEVICES = ("cpu", "cuda")


def network(width, depth):
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))


def models(device):
    width, batch = (4096, 8192) if device == "cuda" else (512, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    student, teacher = (network(width, depth).to(device, dtype) for depth in (2, 6))
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-6, fused=True)
    return student, teacher, optimizer, torch.randn(batch, width, device=device, dtype=dtype)


def waste(device):
    student, teacher, optimizer, x = models(device)

    def step():
        wanted = teacher(x)  # waste
        torch.nn.functional.mse_loss(student(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean(device):
    student, teacher, optimizer, x = models(device)

    def step():
        with torch.no_grad():
            wanted = teacher(x)
        torch.nn.functional.mse_loss(student(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
