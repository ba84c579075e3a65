"""Particles that repel each other: near pairs are listed anew in every step."""

import torch

RULE = "pairs-listed-every-step"
DEVICES = ("cpu", "cuda")
BY_NATURE = {"launch-bound", "unfused-pointwise"}
"""What the twin has as well: kernels of few elements."""
RADIUS = 1.0


class Particles:
    def __init__(self, device):
        side = 18 if device == "cuda" else 9
        places = torch.arange(side, device=device, dtype=torch.float32)
        self.x = torch.cartesian_prod(places, places, places)
        self.box, self.steps = float(side), 0
        self.pairs = ()

    def list_pairs(self):
        self.pairs = (torch.cdist(self.x, self.x) < RADIUS).nonzero().unbind(1)

    def move(self):
        first, second = self.pairs
        delta = self.x.index_select(0, first) - self.x.index_select(0, second)
        push = torch.zeros_like(self.x).index_add_(0, first, delta)
        self.x = torch.remainder(self.x + 0.001 * push, self.box)


def waste(device):
    particles = Particles(device)

    def step():
        with torch.no_grad():
            particles.list_pairs()  # waste
            particles.move()

    return step


def clean(device):
    particles = Particles(device)
    particles.list_pairs()

    def step():
        with torch.no_grad():
            particles.move()

    return step
