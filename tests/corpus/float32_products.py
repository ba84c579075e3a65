"""Layers run in float32 on a GPU that has tf32."""

import torch

RULE = "float32-products"
DEVICES = ("cuda",)


def build(device, precision):
    size = 4096 if device == "cuda" else 256
    weight = torch.randn(size, size, device=device, requires_grad=True)
    x, gradient = torch.randn(2, 2 * size, size, device=device).unbind()

    def step():
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            out = x @ weight  # waste
            out.backward(gradient)
        finally:
            torch.set_float32_matmul_precision(before)
        weight.grad = None
        return out.detach()

    return step


def waste(device):
    return build(device, "highest")


def clean(device):
    return build(device, "high")
