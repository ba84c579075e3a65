"""Trains a causal transformer that tells the next purchase from the ones before it."""

# cpu: --items 1000 --width 64 --layers 2 --heads 2 --length 96 --batch-size 8
# cuda: --items 50000 --width 512 --layers 4 --heads 8 --length 200 --batch-size 128
# block: 16

import argparse

import torch
import torch.nn.functional as F
from torch import nn

PAD = 0
"""Stands after the last purchase of a short history."""


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class NextPurchase(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.items = nn.Embedding(args.items, args.width, padding_idx=PAD)
        self.positions = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.bias = nn.Parameter(torch.zeros(args.items))
        nn.init.normal_(self.items.weight, std=0.02)

    def forward(self, history):
        x = self.items(history) + self.positions.weight[: history.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.items.weight, self.bias)


class Histories:
    """What every customer bought, in order: most bought little, a few bought a lot."""

    def __init__(self, args, batches):
        customers = args.batch_size * batches
        self.size, self.longest = args.batch_size, args.length
        self.lengths = (torch.empty(customers).exponential_(1 / (0.15 * args.length)).long() + 4).clamp(max=args.length)
        self.items = torch.randint(1, args.items, (customers, args.length + 1))
        self.items[torch.arange(args.length + 1) > self.lengths[:, None]] = PAD

    def to(self, device):
        self.items = self.items.to(device)
        return self

    def epoch(self):
        """Batches of histories, each customer once."""
        # mend: padded-to-full-length
        for customers in torch.randperm(len(self.lengths), device=self.items.device).split(self.size):
            yield self.items[customers, : self.longest + 1]  # waste: padded-to-full-length
        # instead: lengths, order = self.lengths.sort()
        # instead: groups = order.to(self.items.device).split(self.size)
        # instead: for number in torch.randperm(len(groups)).tolist():
        # instead:     longest = int(lengths[(number + 1) * self.size - 1])
        # instead:     yield self.items[groups[number], : longest + 1]


def train_step(model, optimizer, batch):
    logits = model(batch[:, :-1])  # waste: padded-to-full-length
    # instead: logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=50000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=48)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = NextPurchase(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    histories = Histories(args, batches=16).to(device)
    step = 0
    while step < args.steps:
        total = torch.zeros((), device=device)
        for batch in histories.epoch():
            total += train_step(model, optimizer, batch)
            step += 1
            if step == args.steps:
                break
            # step
        print(f"step {step}: mean loss of the epoch {total.item() / 16:.3f}")


if __name__ == "__main__":
    main()
