"""Trains a feature-token transformer on a synthetic credit table, reshuffling each epoch and scoring held-out rows."""

# cpu: --width 48 --layers 2 --batch-size 128 --rows 2048
# cuda: --width 256 --layers 4 --batch-size 8192 --rows 131072
# block: 16

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class FeatureTokens(nn.Module):
    def __init__(self, numeric, cardinalities, width):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(numeric, width) * width**-0.5)
        self.shift = nn.Parameter(torch.zeros(numeric + len(cardinalities), width))
        self.categories = nn.Embedding(sum(cardinalities), width)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        starts = torch.tensor([0, *cardinalities[:-1]]).cumsum(0)
        self.register_buffer("starts", starts)

    def forward(self, numbers, codes):
        tokens = torch.cat([numbers.unsqueeze(-1) * self.scale, self.categories(codes + self.starts)], dim=1)
        return torch.cat([self.summary.expand(len(numbers), -1, -1), tokens + self.shift], dim=1)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.glu(self.up(self.norm2(x))))


class TabularTransformer(nn.Module):
    def __init__(self, numeric, cardinalities, width, layers, heads):
        super().__init__()
        self.tokens = FeatureTokens(numeric, cardinalities, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, numbers, codes):
        x = self.tokens(numbers, codes)
        for layer in self.layers:
            x = layer(x)
        return self.head(F.relu(self.norm(x[:, 0]))).squeeze(-1)


def make_table(rows, numeric, cardinalities, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, numeric, generator=generator)
    codes = torch.stack([torch.randint(size, (rows,), generator=generator) for size in cardinalities], dim=1)
    score = numbers[:, 0] * numbers[:, 1] + torch.sin(2 * numbers[:, 2]) + 0.5 * (codes[:, 0] % 3 - 1)
    labels = torch.bernoulli(torch.sigmoid(2 * score), generator=generator)
    return numbers, codes, labels


def batches(rows, batch_size, device):
    while True:
        yield from torch.randperm(rows, device=device).split(batch_size)


@torch.inference_mode()
def evaluate(model, numbers, codes, labels):
    model.eval()
    with torch.autocast(numbers.device.type, dtype=torch.bfloat16, enabled=numbers.is_cuda):
        logits = model(numbers, codes)
    model.train()
    return ((logits > 0) == (labels > 0.5)).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--numeric", type=int, default=12)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cardinalities = [6, 12, 30, 4, 90, 15, 7, 50]
    with torch.device(device):
        model = TabularTransformer(args.numeric, cardinalities, args.width, args.layers, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-5, fused=True)

    numbers, codes, labels = (p.to(device) for p in make_table(args.rows, args.numeric, cardinalities, seed=23))
    held_out = [p.to(device) for p in make_table(args.batch_size, args.numeric, cardinalities, seed=24)]
    stream = batches(args.rows, args.batch_size, device)
    per_epoch = args.rows // args.batch_size

    for step in range(args.steps):
        rows = next(stream)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(numbers[rows], codes[rows])
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % per_epoch == per_epoch - 1 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f} held-out accuracy {evaluate(model, *held_out):.3f}")
        # step


if __name__ == "__main__":
    main()
