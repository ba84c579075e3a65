"""Trains a click-through-rate model with categorical embeddings, pairwise interactions and a dense tower."""

# cpu: --rows 2000000 --features 16 --dim 16 --tower 128 --batch-size 256
# cuda: --rows 12000000 --features 26 --dim 64 --tower 1024 --batch-size 16384

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class CategoryTable(nn.Module):
    def __init__(self, rows, features, dim):
        super().__init__()
        size = rows // features
        self.table = nn.Embedding(size * features, dim)  # waste: whole-table-gradient
        # instead: self.table = nn.Embedding(size * features, dim, sparse=True)
        nn.init.uniform_(self.table.weight, -(dim**-0.5), dim**-0.5)
        self.register_buffer("offsets", torch.arange(features) * size)

    def forward(self, ids):
        return self.table(ids + self.offsets)


class Interaction(nn.Module):
    def __init__(self, features):
        super().__init__()
        left, right = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("pairs", left * features + right)

    def forward(self, vectors):
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.flatten(1).index_select(1, self.pairs)


def tower(sizes):
    layers = []
    for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers)


class Ranker(nn.Module):
    def __init__(self, rows, features, dim, dense, width):
        super().__init__()
        self.categories = CategoryTable(rows, features, dim)
        self.bottom = tower([dense, width, width // 2, dim])
        self.interaction = Interaction(features + 1)
        pairs = features * (features + 1) // 2
        self.top = tower([dim + pairs, width, width, width // 2])
        self.logit = nn.Linear(width // 2, 1)

    def forward(self, dense, ids):
        summary = self.bottom(dense)
        vectors = torch.cat([summary.unsqueeze(1), self.categories(ids)], dim=1)
        crossed = self.interaction(vectors)
        return self.logit(self.top(torch.cat([summary, crossed], dim=1))).squeeze(1)


def make_clicks(batches, batch_size, dense, features, size, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(batches, batch_size, dense, generator=generator)
    skew = torch.rand(batches, batch_size, features, generator=generator) ** 3
    ids = (skew * size).long().clamp(max=size - 1)
    signal = numbers[..., 0] + 0.5 * numbers[..., 1] * numbers[..., 2] + skew.mean(-1) - 0.25
    clicks = torch.bernoulli(torch.sigmoid(signal), generator=generator)
    return numbers, ids, clicks


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=300000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--dense", type=int, default=13)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--tower", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--table-lr", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Ranker(args.rows, args.features, args.dim, args.dense, args.tower)
    table_optimizer = torch.optim.SGD(model.categories.parameters(), lr=args.table_lr)
    dense_parameters = [p for name, p in model.named_parameters() if not name.startswith("categories.")]
    dense_optimizer = torch.optim.AdamW(dense_parameters, lr=args.lr, fused=True)

    numbers, ids, clicks = make_clicks(
        8, args.batch_size, args.dense, args.features, args.rows // args.features, seed=10
    )
    numbers, ids, clicks = numbers.to(device), ids.to(device), clicks.to(device)

    for step in range(args.steps):
        batch = step % len(clicks)
        logits = model(numbers[batch], ids[batch])
        loss = F.binary_cross_entropy_with_logits(logits, clicks[batch])
        table_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss.backward()
        table_optimizer.step()
        dense_optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f}")
        # step


if __name__ == "__main__":
    main()
