"""Every step ranks all scores to log how well they order the labels."""

import torch
from torch import nn
from torch.nn import functional

RULE = "metrics-every-step"
DEVICES = ("cpu", "cuda")
STEPS = [0]


def area_under_curve(scores, labels):
    places = torch.arange(1.0, len(scores) + 1, device=scores.device)
    ranks = torch.empty_like(scores).scatter_(0, scores.argsort(), places)
    positive = labels.sum()
    return (ranks[labels > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))


def built(device):
    torch.manual_seed(0)
    rows, width = (1 << 21, 16) if device == "cuda" else (1 << 16, 16)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)).to(device)
    x, labels = torch.randn(rows, width, device=device), torch.randint(2, (rows,), device=device).float()
    return model, torch.optim.SGD(model.parameters(), lr=0.01), x, labels


def waste(device):
    return training(device, every=1)


def clean(device):
    return training(device, every=0)


def training(device, every):
    model, optimizer, x, labels = built(device)

    def step():
        scores = model(x)[:, 0]
        functional.binary_cross_entropy_with_logits(scores, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if every:
            area_under_curve(scores.detach(), labels).item()  # waste

    return step
