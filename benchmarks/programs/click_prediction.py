"""Predicts clicks from categorical features (bags of ids in large tables) and dense ones."""

# cpu: --rows 60000 --tables 4 --batch-size 512 --dim 32
# cuda: --rows 1000000 --tables 12 --batch-size 16384 --dim 64
# rules: dense-bag-gradients dense-embedding-gradient

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class ClickModel(nn.Module):
    def __init__(self, tables, rows, dim, dense):
        super().__init__()
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(rows, dim, mode="sum")  # waste: dense-bag-gradients
                # instead: nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
                for _ in range(tables)
            ]
        )
        self.bottom = nn.Sequential(nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(dim * (tables + 1), 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense, ids):
        pooled = [table(ids[:, number]) for number, table in enumerate(self.tables)]  # waste: dense-bag-gradients
        return self.top(torch.cat([self.bottom(dense), *pooled], dim=1)).squeeze(1)


class ClickLog:
    """A synthetic log: ids follow a power law, as they do in practice."""

    def __init__(self, args, device):
        self.args, self.device = args, device

    def batch(self):
        args = self.args
        draws = torch.rand(args.batch_size, args.tables, args.bag, device=self.device)
        ids = (draws**3 * args.rows).long()
        dense = torch.randn(args.batch_size, args.dense, device=self.device)
        clicked = (torch.rand(args.batch_size, device=self.device) < 0.1).float()
        return dense, ids, clicked


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--tables", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dense", type=int, default=13)
    parser.add_argument("--bag", type=int, default=8, help="ids of a feature")
    parser.add_argument("--batch-size", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    model = ClickModel(args.tables, args.rows, args.dim, args.dense).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    log = ClickLog(args, device)

    for step in range(args.steps):
        dense, ids, clicked = log.batch()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(dense, ids), clicked)
        loss.backward()
        optimizer.step()  # waste: dense-bag-gradients
        if step % 10 == 0:
            print(f"{step:6d}  loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
