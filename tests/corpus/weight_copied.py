"""A weight is kept in a wide dtype and made narrow in every step of inference."""

import torch

RULE = "weight-copied"
DEVICES = ("cpu", "cuda")


def dtypes(device):
    return (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float64, torch.float32)


def predicting(device, dtype):
    width, rows = (8192, 512) if device == "cuda" else (2048, 16)
    model = torch.nn.Linear(width, width, bias=False, device=device, dtype=dtype)
    return model, torch.randn(rows, width, device=device, dtype=dtypes(device)[1])


def waste(device):
    wide, narrow = dtypes(device)
    model, x = predicting(device, wide)

    @torch.no_grad()
    def step():
        weight = model.weight.to(narrow)  # waste
        return torch.nn.functional.linear(x, weight)

    return step


def clean(device):
    model, x = predicting(device, dtypes(device)[1])

    @torch.no_grad()
    def step():
        return model(x)

    return step
