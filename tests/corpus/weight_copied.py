"""Weights are kept in a wide dtype and made narrow in every step of inference."""

import torch

RULE = "weight-copied"
DEVICES = ("cpu", "cuda")


def dtypes(device):
    return (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float64, torch.float32)


def predicting(device, dtype):
    width, rows, layers = (8192, 512, 16) if device == "cuda" else (2048, 16, 1)
    models = [torch.nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)]
    return models, torch.randn(rows, width, device=device, dtype=dtypes(device)[1])


def waste(device):
    wide, narrow = dtypes(device)
    models, start = predicting(device, wide)

    @torch.no_grad()
    def step():
        x = start
        for model in models:
            weight = model.weight.to(narrow)  # waste
            x = torch.nn.functional.linear(x, weight)
        return x

    return step


def clean(device):
    models, start = predicting(device, dtypes(device)[1])

    @torch.no_grad()
    def step():
        x = start
        for model in models:
            x = model(x)
        return x

    return step
