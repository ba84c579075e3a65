"""Trains two towers that bring users and products together: one true product against thousands of sampled ones."""

# cpu: --users 8000 --items 20000 --dimension 64 --hidden 128 --batch-size 256 --negatives 512
# cuda: --users 1000000 --items 2000000 --dimension 128 --hidden 1024 --batch-size 4096 --negatives 8192

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    """Vectors of unit length for the ids of one side."""

    def __init__(self, ids, dimension, hidden, device):
        super().__init__()
        self.table = nn.Embedding(ids, dimension, device=device)  # waste: dense-table-gradient
        # instead: self.table = nn.Embedding(ids, dimension, device=device, sparse=True)
        self.mlp = nn.Sequential(
            nn.Linear(dimension, hidden, device=device),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden, device=device),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, dimension, device=device),
        )

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids)).float(), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self, args, device):
        super().__init__()
        self.users = Tower(args.users, args.dimension, args.hidden, device)
        self.items = Tower(args.items, args.dimension, args.hidden, device)

    def forward(self, users, candidates):
        return self.users(users), self.items(candidates)


def sample_items(count, items, device):
    """Ids whose frequency falls with their rank, and the logarithms of their chances (Zipf's law)."""
    ids = torch.rand(count, device=device).mul_(math.log(items + 1)).exp_().long().sub_(1).clamp_(0, items - 1)
    chance = torch.log1p(1 / (ids + 1)) / math.log(items + 1)
    return ids, chance.clamp_min_(1e-12).log_()


def true_ranks(scores):
    """How many candidates stand before the true one, which is the one on the diagonal."""
    labels = torch.arange(len(scores), device=scores.device)
    # mend: rank-by-sorting
    order = scores.argsort(dim=1, descending=True)  # waste: rank-by-sorting
    return (order == labels[:, None]).int().argmax(dim=1)
    # instead: return (scores > scores.gather(1, labels[:, None])).sum(dim=1)


class Interactions:
    """Users with a product that each of them has bought."""

    def __init__(self, args, device, count=200_000):
        self.users = torch.randint(args.users, (count,), device=device)
        self.items = sample_items(count, args.items, device)[0]

    def batch(self, size):
        picked = torch.randint(len(self.users), (size,), device=self.users.device)
        return self.users[picked], self.items[picked]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=2_000_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--negatives", type=int, default=8192)
    parser.add_argument("--temperature", type=float, default=0.07)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TwoTowers(args, device)
    tables = torch.optim.Adagrad([model.users.table.weight, model.items.table.weight], lr=0.05)
    dense = [*model.users.mlp.parameters(), *model.items.mlp.parameters()]
    optimizer = torch.optim.AdamW(dense, lr=1e-3, fused=True)
    interactions = Interactions(args, device)
    labels = torch.arange(args.batch_size, device=device)
    found = torch.zeros((), device=device)

    for step in range(args.steps):
        users, bought = interactions.batch(args.batch_size)
        others, chance = sample_items(args.negatives, args.items, device)
        candidates = torch.cat([bought, others])
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            wanted, offered = model(users, candidates)
        scores = wanted @ offered.T / args.temperature
        again = (candidates == bought[:, None]).fill_diagonal_(False)
        scores = scores.masked_fill(again, -1e4)
        correction = torch.cat([chance.new_zeros(args.batch_size), chance + math.log(args.negatives)])
        loss = F.cross_entropy(scores - correction, labels)
        loss.backward()
        optimizer.step()
        tables.step()  # waste: dense-table-gradient
        # instead: tables.step()
        optimizer.zero_grad()
        tables.zero_grad()
        found += (true_ranks(scores.detach()) < 10).float().mean()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, recall at 10 {found.item() / (step + 1):.4f}")
        # step


if __name__ == "__main__":
    main()
