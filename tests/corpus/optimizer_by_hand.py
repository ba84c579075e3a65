"""AdamW written by hand: a loop over the parameters with a dozen ops for each."""

import torch

RULE = "unfused-optimizer"
DEVICES = ("cpu", "cuda")


def parts(device):
    width, depth, batch = (8192, 4, 1024) if device == "cuda" else (512, 8, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = [torch.nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(depth)]
    model = torch.nn.Sequential(*layers)
    x, gradient = torch.randn(2, batch, width, device=device, dtype=dtype)
    return model, x, gradient


def waste(device):
    model, x, gradient = parts(device)
    states = [(torch.zeros_like(each), torch.zeros_like(each)) for each in model.parameters()]

    @torch.no_grad()
    def update():
        for parameter, (mean, square) in zip(model.parameters(), states, strict=True):
            mean.mul_(0.9).add_(parameter.grad, alpha=0.1)  # waste
            square.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter.mul_(1 - 1e-5)
            parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)

    def step():
        model(x).backward(gradient)
        update()
        model.zero_grad()

    return step


def clean(device):
    model, x, gradient = parts(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        model(x).backward(gradient)
        optimizer.step()
        model.zero_grad()

    return step
