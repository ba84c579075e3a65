"""A critic values the candidates of a batch one at a time."""

import torch
from torch import nn

RULE = "unbatched-loop"
DEVICES = ("cpu", "cuda")
CANDIDATES = 24


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, seen, moves):
        return self.layers(torch.cat([seen, moves], dim=-1)).squeeze(-1)


def parts(device):
    torch.manual_seed(0)
    width, batch = (4096, 256) if device == "cuda" else (128, 32)
    critic = Critic(width).to(device)
    return critic, torch.randn(batch, 24, device=device), torch.randn(batch, CANDIDATES, 8, device=device)


def waste(device):
    critic, seen, candidates = parts(device)

    def step():
        values = []
        for k in range(CANDIDATES):
            values.append(critic(seen, candidates[:, k]))  # waste
        torch.stack(values, dim=1).logsumexp(1).mean().backward()

    return step


def clean(device):
    critic, seen, candidates = parts(device)

    def step():
        values = critic(seen[:, None].expand(-1, CANDIDATES, -1), candidates)
        values.logsumexp(1).mean().backward()

    return step
