"""Float32 products without tf32."""

import torch

RULE = "float32-products"
DEVICES = ("cuda",)


def model(device):
    layers = [torch.nn.Linear(4096, 4096, bias=False, device=device) for _ in range(4)]
    layers = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-6, fused=True)
    return layers, optimizer, torch.randn(4096, 4096, device=device)


def waste(device):
    layers, optimizer, x = model(device)

    def step():
        torch.set_float32_matmul_precision("highest")
        loss = layers(x).sum()  # waste
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean(device):
    layers, optimizer, x = model(device)

    def step():
        torch.set_float32_matmul_precision("high")
        loss = layers(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.set_float32_matmul_precision("highest")

    return step
