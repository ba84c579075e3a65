"""An LSTM runs its cell in a Python loop over time, where one call takes all steps."""

import torch

RULE = "unrolled-recurrence"
DEVICES = ("cpu", "cuda")


def parts(device):
    steps, batch, inputs, hidden = (128, 1024, 512, 1024) if device == "cuda" else (48, 8, 64, 64)
    dtype = torch.float16 if device == "cuda" else torch.float32
    return torch.randn(steps, batch, inputs, device=device, dtype=dtype), inputs, hidden


def waste(device):
    x, inputs, hidden = parts(device)
    cell = torch.nn.LSTMCell(inputs, hidden, device=device, dtype=x.dtype)

    def step():
        h = c = x.new_zeros(x.shape[1], hidden)
        out = []
        for number in range(x.shape[0]):
            h, c = cell(x[number], (h, c))  # waste
            out.append(h)
        torch.stack(out).sum().backward()

    return step


def clean(device):
    x, inputs, hidden = parts(device)
    network = torch.nn.LSTM(inputs, hidden, device=device, dtype=x.dtype)

    def step():
        network(x)[0].sum().backward()

    return step
