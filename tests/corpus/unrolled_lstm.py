"""An LSTM runs its cell in a Python loop over time, where one call takes all steps."""

import torch

RULE = "unrolled-recurrence"
DEVICES = ("cpu", "cuda")


def parts(device):
    steps, batch, inputs, hidden = (128, 64, 512, 512) if device == "cuda" else (48, 8, 64, 64)
    return torch.randn(steps, batch, inputs, device=device), inputs, hidden


def waste(device):
    x, inputs, hidden = parts(device)
    cell = torch.nn.LSTMCell(inputs, hidden, device=device)

    def step():
        h = c = torch.zeros(x.shape[1], hidden, device=device)
        out = []
        for number in range(x.shape[0]):
            h, c = cell(x[number], (h, c))  # waste
            out.append(h)
        torch.stack(out).sum().backward()

    return step


def clean(device):
    x, inputs, hidden = parts(device)
    network = torch.nn.LSTM(inputs, hidden, device=device)

    def step():
        network(x)[0].sum().backward()

    return step
