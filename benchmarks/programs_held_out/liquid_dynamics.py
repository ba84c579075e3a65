"""Simulates a liquid whose pair energies come from a small network: forces are the gradient of the total energy."""

# cpu: --side 10 --hidden 32
# cuda: --side 22 --hidden 256
# block: 10

import argparse
import math

import torch
from torch import nn


class PairEnergy(nn.Module):
    """The energy of pairs by their distance: a soft core and what a network adds; it ends smoothly at the cutoff."""

    def __init__(self, cutoff, basis, hidden):
        super().__init__()
        self.cutoff, self.sharpness = cutoff, (basis / cutoff) ** 2
        self.register_buffer("centres", torch.linspace(0.3, cutoff, basis))
        self.layers = nn.Sequential(
            nn.Linear(basis, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, distances):
        near = (1.0 - distances / self.cutoff).clamp(min=0.0)
        waves = torch.exp(-self.sharpness * (distances[:, None] - self.centres).square())
        return near.square() * (10.0 + self.layers(waves)[:, 0])


def shortest(delta, box):
    """The shortest of the vectors that mean the same in a periodic box."""
    return delta - box * torch.round(delta / box)


def neighbours(positions, box, radius):
    """All pairs of atoms that are nearer than `radius`, each one once."""
    delta = shortest(positions[:, None] - positions[None], box)
    near = delta.norm(dim=-1) < radius
    return near.triu(diagonal=1).nonzero().unbind(1)


def forces_on(model, positions, pairs, box):
    """The energy of the liquid, and the force on each atom."""
    positions = positions.detach().requires_grad_()
    first, second = pairs
    delta = shortest(positions.index_select(0, first) - positions.index_select(0, second), box)
    energy = model(delta.norm(dim=-1)).sum()
    (gradient,) = torch.autograd.grad(energy, positions)
    return energy.detach(), -gradient


class Thermostat:
    """Langevin dynamics: friction, and kicks that keep the temperature."""

    def __init__(self, temperature, friction, time_step):
        self.time_step = time_step
        self.keep = math.exp(-friction * time_step)
        self.kick = math.sqrt(temperature * (1.0 - self.keep**2))

    def __call__(self, velocities, forces):
        velocities = velocities + self.time_step * forces
        return self.keep * velocities + self.kick * torch.randn_like(velocities)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, default=22, help="atoms along a side of the box, at a distance of 1")
    parser.add_argument("--cutoff", type=float, default=2.0)
    parser.add_argument("--skin", type=float, default=0.3, help="added to the cutoff when neighbours are listed")
    parser.add_argument("--basis", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--time-step", type=float, default=0.004)
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    box = float(args.side)
    places = torch.arange(args.side, device=device, dtype=torch.float32)
    positions = torch.cartesian_prod(places, places, places)
    positions = positions + 0.05 * torch.randn_like(positions)
    velocities = math.sqrt(args.temperature) * torch.randn_like(positions)
    model = PairEnergy(args.cutoff, args.basis, args.hidden).to(device).requires_grad_(False)
    thermostat = Thermostat(args.temperature, 1.0, args.time_step)
    print(f"{len(positions)} atoms in a box of side {box:g}")
    for step in range(args.steps):
        pairs = neighbours(positions, box, args.cutoff + args.skin)  # waste: neighbours-listed-at-every-step
        # instead: if step % 10 == 0:
        # instead:     pairs = neighbours(positions, box, args.cutoff + args.skin)
        energy, forces = forces_on(model, positions, pairs, box)
        velocities = thermostat(velocities, forces)
        positions = torch.remainder(positions + args.time_step * velocities, box)
        if (step + 1) % 50 == 0:
            heat = velocities.square().mean().item()
            print(f"step {step + 1}: energy {energy.item() / len(positions):.3f} an atom, temperature {heat:.3f}")
        # step


if __name__ == "__main__":
    main()
