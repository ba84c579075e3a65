"""Float32 products without tf32."""

import torch

RULE = "float32-products"
DEVICES = ("cuda",)


def model(device):
    layers = [torch.nn.Linear(4096, 4096, bias=False, device=device) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(4096, 4096, device=device)


def waste(device):
    layers, x = model(device)

    def step():
        torch.set_float32_matmul_precision("highest")
        loss = layers(x).sum()  # waste
        loss.backward()
        layers.zero_grad()

    return step


def clean(device):
    layers, x = model(device)

    def step():
        torch.set_float32_matmul_precision("high")
        loss = layers(x).sum()
        loss.backward()
        layers.zero_grad()
        torch.set_float32_matmul_precision("highest")

    return step
