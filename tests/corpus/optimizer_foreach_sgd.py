"""SGD with momentum goes over lists of tensors, once for each thing that it does."""

import torch

RULE = "unfused-optimizer"
DEVICES = ("cpu", "cuda")


def training(device, **how):
    width, depth, batch = (4096, 8, 2048) if device == "cuda" else (1024, 3, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = [torch.nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(depth)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1, **how)  # waste
    x, gradient = torch.randn(2, batch, width, device=device, dtype=dtype)

    def step():
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return training(device, foreach=True)


def clean(device):
    return training(device, fused=True)
