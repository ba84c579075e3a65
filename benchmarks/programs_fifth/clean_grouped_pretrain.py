"""Pretrain a decoder with grouped-query attention in bfloat16, with accumulated microbatches and a cosine schedule."""

# cpu: --width 128 --layers 3 --batch-size 4 --context 128 --vocab 1024
# cuda: --width 1024 --layers 8 --batch-size 8 --context 1024 --vocab 16384

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class DecoderConfig:
    vocab: int
    width: int
    layers: int
    context: int
    heads: int = 8
    kv_heads: int = 2

    @property
    def head_width(self):
        return self.width // self.heads


class GroupedAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key_value = nn.Linear(config.width, 2 * config.kv_heads * config.head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        c = self.config
        q = self.query(x).view(b, t, c.heads, c.head_width).transpose(1, 2)
        k, v = self.key_value(x).view(b, t, 2, c.kv_heads, c.head_width).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class GatedMlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width, bias=False), GroupedAttention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.width, bias=False), GatedMlp(config.width, 3 * config.width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(config.context, config.width))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        for layer in self.layers:
            nn.init.normal_(layer.attention.out.weight, std=0.02 / math.sqrt(2 * config.layers))
            nn.init.normal_(layer.mlp.down.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens):
        x = self.token(tokens) + self.position[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def cosine(step, total, warmup=10, floor=0.1):
    if step < warmup:
        return (step + 1) / warmup
    way = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * way))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=1024)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = DecoderConfig(args.vocab, args.width, args.layers, args.context)
    with torch.device(device):
        model = Decoder(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, args.steps))
    corpus = (torch.arange(1 << 18, device=device) * 7 + torch.randint(0, 3, (1 << 18,), device=device)) % args.vocab
    offsets = torch.arange(args.context + 1, device=device)

    for step in range(args.steps):
        starts = torch.randint(0, len(corpus) - args.context, (args.microbatches, args.batch_size, 1), device=device)
        for window in corpus[starts + offsets]:
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            (loss / args.microbatches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
