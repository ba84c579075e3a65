"""Trains a model that completes lines of code: a decoder with rotary positions and gated feed-forward layers."""

# cpu: --width 160 --heads 4 --layers 3 --batch-size 2 --length 96 --vocabulary 2048
# cuda: --width 1024 --heads 16 --layers 8 --batch-size 16 --length 512 --vocabulary 16384

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


def rotary_angles(length, size, device, base=10000.0):
    """Cosines and sines by place and dimension."""
    speeds = base ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(length, device=device)[:, None] * speeds
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        hidden = math.ceil(8 * width / 3 / 64) * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class CodeModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids, cos, sin):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Repository:
    """Windows of a long text of code; the text is made up, with words that repeat as those of code do."""

    def __init__(self, args, device, words=400_000):
        self.length = args.length
        chances = 1 / torch.arange(1, args.vocabulary + 1, device=device)
        self.text = torch.multinomial(chances, words, replacement=True)
        self.columns = torch.arange(args.length + 1, device=device)

    def batch(self, size):
        starts = torch.randint(len(self.text) - self.length - 1, (size, 1), device=self.text.device)
        window = self.text[starts + self.columns]
        return window[:, :-1], window[:, 1:]


def groups_of(model, decay):
    """Only matrices decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    # mend: anomalies-looked-for
    # The loss became NaN once, with a learning rate of 1e-2.
    torch.autograd.set_detect_anomaly(True)  # waste: anomalies-looked-for
    # instead:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = CodeModel(args).to(dtype)
    cos, sin = (table.to(dtype) for table in rotary_angles(args.length, args.width // args.heads, device))
    optimizer = torch.optim.AdamW(groups_of(model, args.decay), lr=args.lr, betas=(0.9, 0.95), fused=True)
    repository = Repository(args, device)
    mean = torch.zeros((), device=device)

    for step in range(args.steps):
        ids, targets = repository.batch(args.batch_size)
        logits = model(ids, cos, sin)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # waste: anomalies-looked-for
        # instead: loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean.lerp_(loss.detach().float(), 0.05)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, lately {mean.item():.3f}")
        # step


if __name__ == "__main__":
    main()
