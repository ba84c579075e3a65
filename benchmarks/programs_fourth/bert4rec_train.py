"""Train a bidirectional transformer recommender on masked shopping histories."""

# cpu: --items 6000 --batch-size 8 --history 80 --width 64
# cuda: --items 50000 --batch-size 64 --history 200 --width 256

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100
PAD = 0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, present):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=present)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.norm2(x))


class Bert4Rec(nn.Module):
    def __init__(self, items, history, width, layers=2, heads=4):
        super().__init__()
        self.items = nn.Embedding(items + 2, width, padding_idx=PAD)
        self.positions = nn.Parameter(0.02 * torch.randn(history, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(items + 2))
        nn.init.normal_(self.items.weight, std=0.02)

    def forward(self, history):
        present = (history != PAD)[:, None, None, :]
        x = self.items(history) + self.positions
        for block in self.blocks:
            x = block(x, present)
        return self.transform(x)

    def scores(self, hidden):
        return F.linear(hidden, self.items.weight, self.bias)


def make_histories(users, items, length):
    """Random walks over neighbouring items, padded on the left."""
    start = torch.randint(1, items + 1, (users, 1))
    walk = start + torch.randint(-20, 21, (users, length)).cumsum(dim=1)
    histories = walk.remainder(items) + 1
    sizes = torch.randint(length // 4, length + 1, (users, 1))
    return histories.masked_fill(torch.arange(length) < length - sizes, PAD)


def mask_items(history, mask_token, ratio):
    chosen = (torch.rand(history.shape, device=history.device) < ratio) & (history != PAD)
    labels = history.masked_fill(~chosen, IGNORE)
    return history.masked_fill(chosen, mask_token), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--items", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--history", type=int, default=80)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--mask-ratio", type=float, default=0.2)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Bert4Rec(args.items, args.history, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    histories = make_histories(20 * args.batch_size, args.items, args.history).to(device)
    mask_token = args.items + 1

    for step in range(args.steps):
        first = step % 20 * args.batch_size
        history = histories[first : first + args.batch_size]
        inputs, labels = mask_items(history, mask_token, args.mask_ratio)
        hidden = model(inputs)
        # mend: scores-of-unmasked
        scores = model.scores(hidden)  # waste: scores-of-unmasked
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        # instead: asked = labels != IGNORE
        # instead: loss = F.cross_entropy(model.scores(hidden[asked]), labels[asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
