"""The norm of each of many tensors is taken by an op of its own."""

import torch

RULE = "per-tensor-loop"
DEVICES = ("cpu", "cuda")


def inputs(device):
    width, count = (3072, 600) if device == "cuda" else (32, 600)
    return [torch.randn(width, width, device=device) for _ in range(count)]


def waste(device):
    gradients = inputs(device)

    def step():
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]  # waste
        return torch.linalg.vector_norm(torch.stack(norms))

    return step


def clean(device):
    gradients = inputs(device)

    def step():
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))

    return step
