"""Learns how heat spreads in a plate: a deep operator network, branch and trunk, as it should be done."""

# cpu: --sensors 128 --width 384 --depth 3 --batch-size 256 --grid 24
# cuda: --sensors 1024 --width 2048 --depth 4 --batch-size 4096 --grid 128 --compile

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


def perceptron(inputs, width, depth):
    layers = [nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [nn.ReLU(inplace=True), nn.Linear(width, width)]
    return nn.Sequential(*layers)


class DeepOperator(nn.Module):
    """The solution is a product: what the sources say times what the places say."""

    def __init__(self, sensors, features, width, depth):
        super().__init__()
        self.branch = perceptron(sensors, width, depth)
        self.trunk = perceptron(features, width, depth)
        self.scale = 1 / math.sqrt(width)

    def forward(self, sources, places, temperatures):
        """The mean squared error of the temperatures at all places."""
        answers = (self.branch(sources) * self.scale) @ self.trunk(places).T
        return F.mse_loss(answers, temperatures)


def fourier_features(grid, count, device):
    """Waves at the places of a grid (places, 2 * count)."""
    axis = torch.linspace(0, 1, grid, device=device)
    places = torch.cartesian_prod(axis, axis)
    angles = 2 * math.pi * places @ torch.randn(2, count, device=device)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def make_problems(args, places, device, dtype):
    """Sources as the sensors see them, and the temperatures: batches that lie beside each other in memory."""
    mixture = torch.randn(args.sensors, places.shape[1], device=device) / math.sqrt(args.sensors)
    problems = []
    for _ in range(args.batches):
        sources = torch.randn(args.batch_size, args.sensors, device=device)
        temperatures = (sources @ mixture) @ places.T
        problems.append((sources.to(dtype), (temperatures / math.sqrt(places.shape[1])).to(dtype)))
    return problems


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sensors", type=int, default=1024)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    places = fourier_features(args.grid, args.features, device)
    problems = make_problems(args, places, device, dtype)
    places = places.to(dtype)
    model = DeepOperator(args.sensors, 2 * args.features, args.width, args.depth).to(device)
    if args.compile:
        model.compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    total = torch.zeros((), device=device)
    for step in range(args.steps):
        sources, temperatures = problems[step % len(problems)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(sources, places, temperatures)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: mean squared error {total.item() / 50:.4f}")
            total.zero_()
        # step


if __name__ == "__main__":
    main()
