"""The losses of several tasks run backward one after the other, each through the trunk that all of them share."""

import torch
from torch import nn
from torch.nn import functional

RULE = "repeated-backward"
DEVICES = ("cpu", "cuda")
TASKS = 3


def parts(device):
    torch.manual_seed(0)
    rows, width = (8192, 8192) if device == "cuda" else (256, 512)
    trunk = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()).to(device)
    heads = [nn.Linear(width, 16).to(device) for _ in range(TASKS)]
    x = torch.randn(rows, width, device=device)
    parameters = [*trunk.parameters(), *(weight for head in heads for weight in head.parameters())]
    return trunk, heads, x, torch.optim.SGD(parameters, lr=1e-3, fused=True)


def waste(device):
    trunk, heads, x, optimizer = parts(device)

    def step():
        shared = trunk(x)
        for head in heads:
            functional.huber_loss(head(shared), x[:, :16]).backward(retain_graph=True)  # waste
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean(device):
    trunk, heads, x, optimizer = parts(device)

    def step():
        shared = trunk(x)
        sum(functional.huber_loss(head(shared), x[:, :16]) for head in heads).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
