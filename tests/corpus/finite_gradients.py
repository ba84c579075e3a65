"""Gradients are clipped with a check that they are finite, for which the host waits."""

import torch

RULE = "synchronization"
DEVICES = ("cuda",)


def stepping(device, *, checked):
    torch.manual_seed(0)
    width, rows = (2048, 16384) if device == "cuda" else (64, 16)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12))).to(device, torch.bfloat16)
    # The weights stay as they are: the gradient is that of a loss without a minimum, and hundreds of steps diverge.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    x, gradient = torch.randn(2, rows, width, device=device, dtype=torch.bfloat16)

    def step():
        model(x).backward(gradient)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=checked)  # waste
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return stepping(device, checked=True)


def clean(device):
    return stepping(device, checked=False)
