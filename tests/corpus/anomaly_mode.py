"""Training in which every gradient is looked at for a NaN, since one was searched for once."""

import torch
from torch import nn

RULE = "debugging-left-on"
DEVICES = ("cuda", "cpu")


def training(device, looks):
    torch.manual_seed(0)
    width = 2048 if device == "cuda" else 256
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(12))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
    x = torch.randn(width, width, device=device)

    def step():
        with torch.autograd.set_detect_anomaly(looks):  # waste
            loss = model(x).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return training(device, True)


def clean(device):
    return training(device, False)
