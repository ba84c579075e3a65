"""Trains an encoder-decoder that translates subtitles, with label smoothing."""

# cpu: --width 64 --layers 1 --heads 4 --batch-size 8 --length 32 --vocabulary 4000
# cuda: --width 1024 --layers 3 --batch-size 64 --length 128 --vocabulary 32000

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, context, is_causal=False):
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(context).view(batch, context.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.relu(self.up(x), inplace=True))


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), FeedForward(width)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y)
        return x + self.mlp(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross, self.mlp = Attention(width, heads), Attention(width, heads), FeedForward(width)

    def forward(self, x, source):
        y = self.norm1(x)
        x = x + self.attention(y, y, is_causal=True)
        x = x + self.cross(self.norm2(x), source)
        return x + self.mlp(self.norm3(x))


class Translator(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.source_tokens = nn.Embedding(args.vocabulary, args.width)
        self.target_tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Parameter(torch.randn(args.length, args.width) * 0.02)
        self.encoder = nn.ModuleList([EncoderLayer(args.width, args.heads) for _ in range(args.layers)])
        self.decoder = nn.ModuleList([DecoderLayer(args.width, args.heads) for _ in range(args.layers)])
        self.source_norm, self.norm = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, source, target):
        x = self.source_tokens(source) + self.positions
        for layer in self.encoder:
            x = layer(x)
        context = self.source_norm(x)
        y = self.target_tokens(target) + self.positions
        for layer in self.decoder:
            y = layer(y, context)
        return self.head(self.norm(y))


def smoothed_loss(logits, targets, smoothing):
    """The cross-entropy against targets that leave a little probability to all other tokens."""
    classes = logits.shape[-1]
    logits, targets = logits.flatten(0, 1).float(), targets.flatten()
    # mend: smoothing-by-one-hot
    one_hot = F.one_hot(targets, classes)
    soft = one_hot * (1 - smoothing) + (1 - one_hot) * smoothing / (classes - 1)  # waste: smoothing-by-one-hot
    return -(soft * F.log_softmax(logits, dim=-1)).sum(-1).mean()  # waste: smoothing-by-one-hot
    # instead: return F.cross_entropy(logits, targets, label_smoothing=smoothing * classes / (classes - 1))


def made_up_pairs(args, device, count=2000):
    """Lines of one length, so that no batch has padding: a translation is the source under a permutation."""
    source = torch.randint(1, args.vocabulary, (count, args.length), device=device)
    translated = torch.randperm(args.vocabulary, device=device)
    target = torch.cat([torch.zeros(count, 1, dtype=torch.long, device=device), translated[source]], dim=1)
    return source, target


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Translator(args).to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    sources, targets = made_up_pairs(args, device)

    started = time.perf_counter()
    for step in range(args.steps):
        picks = torch.randint(len(sources), (args.batch_size,), device=device)
        source, target = sources[picks], targets[picks]
        logits = model(source, target[:, :-1])
        loss = smoothed_loss(logits, target[:, 1:], args.smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 20 == 0:
            rate = (step + 1) * args.batch_size * args.length / (time.perf_counter() - started)
            print(f"step {step + 1}: loss {loss.item():.3f}, {rate:.0f} tokens/s")
        # step


if __name__ == "__main__":
    main()
