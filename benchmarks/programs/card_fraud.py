"""Trains a network that marks fraudulent card payments: codes of columns by embeddings, amounts as they are."""

# cpu: --hidden 128 --batch-size 1024 --rows 50000
# cuda: --hidden 2048 --batch-size 2048 --rows 500000

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

CODES = (1000, 500, 2000, 24, 7, 12, 250, 5000, 40, 16, 3, 90, 800, 64, 10, 2)
"""How many values each column of codes has: merchant, terminal, issuer, hour, weekday, ..."""


class Payments(Dataset):
    """Payments of which about one in fifty is a fraud."""

    def __init__(self, rows, amounts):
        self.codes = torch.stack([torch.randint(count, (rows,)) for count in CODES], dim=1)
        self.amounts = torch.randn(rows, amounts)
        suspicion = self.amounts[:, 0] + 2.0 * (self.codes[:, 3] < 5) + (self.codes[:, 0] % 17 == 0)
        self.frauds = (suspicion + 0.3 * torch.randn(rows) > 2.9).float()

    def __len__(self):
        return len(self.frauds)

    def __getitem__(self, index):
        return self.codes[index], self.amounts[index], self.frauds[index]  # waste: rows-one-at-a-time
        # instead: return self.codes[index], self.amounts[index], self.frauds[index]


class FraudModel(nn.Module):
    def __init__(self, amounts, dimension, hidden):
        super().__init__()
        self.table = nn.Embedding(sum(CODES), dimension)
        self.register_buffer("offsets", torch.tensor([0, *CODES[:-1]]).cumsum(0))
        self.norm = nn.LayerNorm(amounts)
        self.layers = nn.Sequential(
            nn.Linear(len(CODES) * dimension + amounts, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, 1),
        )

    def forward(self, codes, amounts):
        embedded = self.table(codes + self.offsets).flatten(1)
        return self.layers(torch.cat([embedded, self.norm(amounts)], dim=1))[:, 0]


def batches(loader):
    """Batches without an end, epoch after epoch."""
    while True:
        yield from loader


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--amounts", type=int, default=32)
    parser.add_argument("--dimension", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    payments = Payments(args.rows, args.amounts)
    model = FraudModel(args.amounts, args.dimension, args.hidden).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    rarity = torch.tensor(20.0, device=device, dtype=dtype)
    pinned = device.type == "cuda"
    # mend: rows-one-at-a-time
    sampler = RandomSampler(payments)
    loader = DataLoader(payments, args.batch_size, sampler=sampler, drop_last=True, pin_memory=pinned)
    # instead: sampler = torch.utils.data.BatchSampler(RandomSampler(payments), args.batch_size, drop_last=True)
    # instead: loader = DataLoader(payments, batch_size=None, sampler=sampler, pin_memory=pinned)

    running = torch.zeros((), device=device)
    stream = batches(loader)
    for step in range(args.steps):
        codes, amounts, frauds = next(stream)  # waste: rows-one-at-a-time
        # instead: codes, amounts, frauds = next(stream)
        codes = codes.to(device, non_blocking=True)
        amounts = amounts.to(device, dtype, non_blocking=True)
        frauds = frauds.to(device, dtype, non_blocking=True)
        logits = model(codes, amounts)
        loss = F.binary_cross_entropy_with_logits(logits, frauds, pos_weight=rarity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running.lerp_(loss.detach().float(), 0.05)
        if step % 20 == 0:
            print(f"step {step}: loss {running.item() / (1 - 0.95 ** (step + 1)):.4f}")
        # step


if __name__ == "__main__":
    main()
