"""Pretrains a decoder-only language model on packed token windows with gradient accumulation and a warm-up schedule."""

# cpu: --width 128 --layers 2 --heads 4 --vocab 1000 --batch-size 4 --seq-len 96 --accumulate 2
# cuda: --width 1024 --layers 8 --heads 16 --vocab 16384 --batch-size 16 --seq-len 512 --accumulate 2

import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads, depth):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer in (self.proj, self.down):
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, width, layers, heads, seq_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList([Block(width, heads, layers) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TokenWindows:
    def __init__(self, length, vocab, device, seed):
        generator = torch.Generator().manual_seed(seed)
        frequencies = torch.arange(1, vocab + 1).float().reciprocal()
        stream = torch.multinomial(frequencies, length, True, generator=generator)
        stream[1::2] = (stream[::2] * 5 + 1) % vocab
        self.stream = stream.to(device)
        self.device = device

    def sample(self, rows, seq_len):
        starts = torch.randint(len(self.stream) - seq_len - 1, (rows, 1), device=self.device)
        windows = self.stream[starts + torch.arange(seq_len + 1, device=self.device)]
        return windows[:, :-1], windows[:, 1:]


def schedule(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = GPT(args.vocab, args.width, args.layers, args.heads, args.seq_len)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, 5, args.steps))
    windows = TokenWindows(200000, args.vocab, device, seed=20)

    began = time.perf_counter()
    running = torch.zeros((), device=device)
    for step in range(args.steps):
        for _ in range(args.accumulate):
            tokens, targets = windows.sample(args.batch_size, args.seq_len)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = model(tokens, targets) / args.accumulate
            loss.backward()
            running += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 9 or step == args.steps - 1:
            elapsed = time.perf_counter() - began
            print(f"step {step} mean loss {running.item() / (step % 10 + 1):.5f} elapsed {elapsed:.2f}s")
            running.zero_()
        # step


if __name__ == "__main__":
    main()
