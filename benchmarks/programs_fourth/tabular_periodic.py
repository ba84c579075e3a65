"""Train a tabular regressor whose numeric features pass through periodic embeddings with a linear map each."""

# cpu: --features 90 --batch-size 256 --width 160
# cuda: --features 200 --batch-size 2048 --width 512

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class PeriodicEmbedding(nn.Module):
    def __init__(self, features, frequencies, width, sigma=0.3):
        super().__init__()
        self.frequency = nn.Parameter(sigma * torch.randn(features, frequencies))
        # mend: linear-per-feature
        self.linears = nn.ModuleList(nn.Linear(2 * frequencies, width) for _ in range(features))
        # instead: linears = [nn.Linear(2 * frequencies, width) for _ in range(features)]
        # instead: self.weight = nn.Parameter(torch.stack([linear.weight.detach().T for linear in linears]))
        # instead: self.bias = nn.Parameter(torch.stack([linear.bias.detach() for linear in linears])[:, None])

    def forward(self, x):
        angle = 2 * torch.pi * self.frequency * x.unsqueeze(-1)
        waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
        # mend: linear-per-feature
        outputs = [linear(waves[:, i]) for i, linear in enumerate(self.linears)]  # waste: linear-per-feature
        x = torch.stack(outputs, dim=1)
        # instead: x = torch.baddbmm(self.bias, waves.transpose(0, 1), self.weight).transpose(0, 1)
        return F.relu(x)


class ResidualBlock(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(F.relu(self.up(self.norm(x)))))


class TabularNet(nn.Module):
    def __init__(self, features, categories, width, blocks=3, frequencies=12, embedding=8, dropout=0.1):
        super().__init__()
        self.numeric = PeriodicEmbedding(features, frequencies, embedding)
        self.categorical = nn.Embedding(sum(categories), embedding)
        offsets = torch.tensor([0, *categories[:-1]]).cumsum(0)
        self.register_buffer("offsets", offsets, persistent=False)
        self.enter = nn.Linear((features + len(categories)) * embedding, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width, dropout) for _ in range(blocks)))
        self.head = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers, kinds):
        embedded = torch.cat([self.numeric(numbers), self.categorical(kinds + self.offsets)], dim=1)
        return self.head(self.blocks(self.enter(embedded.flatten(1)))).squeeze(1)


def make_table(rows, features, categories, device):
    numbers = torch.randn(rows, features, device=device)
    kinds = torch.stack([torch.randint(size, (rows,), device=device) for size in categories], dim=1)
    target = torch.sin(3 * numbers[:, 0]) + numbers[:, 1] * numbers[:, 2] + 0.3 * (kinds[:, 0] % 3)
    return numbers, kinds, (target - target.mean()) / target.std()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--features", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=160)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    categories = [12, 40, 7, 365, 24, 100]
    numbers, kinds, target = make_table(20 * args.batch_size, args.features, categories, device)
    model = TabularNet(args.features, categories, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5, fused=True)

    for step in range(args.steps):
        if step % 20 == 0:
            order = torch.randperm(len(target), device=device)
        rows = order[step % 20 * args.batch_size :][: args.batch_size]
        loss = F.mse_loss(model(numbers[rows], kinds[rows]), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
