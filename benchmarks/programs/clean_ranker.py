"""Trains a ranker with sparse gradients of its table and a deep tower, as it should be done."""

# cpu: --items 50000 --width 512 --batch-size 512
# cuda: --items 5000000 --width 8192 --batch-size 8192 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.score = nn.Linear(width, 1)

    def forward(self, features):
        return self.score(self.layers(features)).squeeze(1)


def draw(args, device, dtype):
    """Items of users' histories, and whether the user bought the last one."""
    items = (torch.rand(args.batch_size, args.history, device=device) ** 2 * args.items).long()
    bought = (torch.rand(args.batch_size, device=device) < 0.3).to(dtype)
    return items, bought


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--history", type=int, default=16)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = nn.Embedding(args.items, args.dim, sparse=True).to(device, dtype)
    tower = Tower(args.dim * args.history, args.width).to(device, dtype)
    if args.compile:
        tower = torch.compile(tower)
    of_table = torch.optim.SGD(table.parameters(), lr=0.1)
    of_tower = torch.optim.AdamW(tower.parameters(), lr=1e-3, fused=True)
    for step in range(args.steps):
        items, bought = draw(args, device, dtype)
        loss = F.binary_cross_entropy_with_logits(tower(table(items).flatten(1)), bought)
        loss.backward()
        of_table.step()
        of_tower.step()
        of_table.zero_grad()
        of_tower.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
