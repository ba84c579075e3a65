"""Gradients are clipped with a check that they are finite, for which the host waits."""

import torch

RULE = "synchronization"
DEVICES = ("cuda",)


def stepping(device, *, checked):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)

    def step():
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=checked)  # waste
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return stepping(device, checked=True)


def clean(device):
    return stepping(device, checked=False)
