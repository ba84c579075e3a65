"""Serve a grouped-query decoder: one token a step for a full batch, over a cache that was allocated in advance."""

# cpu: --width 256 --layers 3 --batch-size 16 --kv-heads 2 --prompt 900 --max-length 1536 --vocab 2000
# cuda: --width 4096 --layers 8 --batch-size 128 --kv-heads 8 --prompt 1000 --max-length 2048 --vocab 32000

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ServingConfig:
    width: int
    layers: int
    kv_heads: int
    groups: int
    vocab: int
    max_length: int

    @property
    def head_width(self):
        return self.width // (self.kv_heads * self.groups)


class CachedAttention(nn.Module):
    def __init__(self, config, batch):
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key_value = nn.Linear(config.width, 2 * kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        shape = (2, batch, config.kv_heads, config.max_length, config.head_width)
        self.register_buffer("cache", torch.zeros(shape), persistent=False)
        self.register_buffer("slots", torch.arange(config.max_length).view(1, 1, 1, -1), persistent=False)

    def forward(self, x, position):
        batch = x.size(0)
        c = self.config
        q = self.query(x).view(batch, c.kv_heads * c.groups, 1, c.head_width)
        fresh = self.key_value(x).view(batch, 2, c.kv_heads, c.head_width).transpose(0, 1)
        self.cache[:, :, :, position] = fresh
        # mend: slots-not-yet-written
        keys, values = self.cache.unbind(0)
        visible = self.slots <= position  # waste: slots-not-yet-written
        # instead: keys, values = self.cache[:, :, :, : position + 1].unbind(0)
        # instead: visible = None
        # mend: repeated-heads
        keys = keys.repeat_interleave(c.groups, dim=1)  # waste: repeated-heads
        values = values.repeat_interleave(c.groups, dim=1)  # waste: repeated-heads
        # instead: q = q.view(batch, c.kv_heads, c.groups, c.head_width)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)  # waste: slots-not-yet-written
        # instead: mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
        return self.out(mixed.reshape(batch, c.width))


class ServingLayer(nn.Module):
    def __init__(self, config, batch):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = CachedAttention(config, batch)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 3 * config.width, bias=False)
        self.down = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x, position):
        x = x + self.attention(self.norm1(x), position)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Server(nn.Module):
    def __init__(self, config, batch):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(ServingLayer(config, batch) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def pretend_prompt(self, length):
        """Fills the cache as a prefill of that many tokens would."""
        for layer in self.layers:
            layer.attention.cache[:, :, :, :length].normal_()

    def forward(self, tokens, position):
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(self.norm(x))


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=900)
    parser.add_argument("--max-length", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=2000)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ServingConfig(args.width, args.layers, args.kv_heads, args.groups, args.vocab, args.max_length)
    with torch.device(device):
        model = Server(config, args.batch_size).eval()
    if device == "cuda":
        model.to(torch.bfloat16)
    model.pretend_prompt(args.prompt)

    tokens = torch.randint(0, args.vocab, (args.batch_size,), device=device)
    finished = torch.zeros(args.batch_size, dtype=torch.bool, device=device)
    likelihood = torch.zeros(args.batch_size, device=device)
    room = args.max_length - args.prompt
    for step in range(args.steps):
        logits = model(tokens, args.prompt + step % room)
        best, tokens = logits.float().log_softmax(dim=-1).max(dim=-1)
        likelihood += torch.where(finished, 0.0, best)
        finished |= tokens == 0
        if step % 10 == 9:
            print(f"token {step}: mean log-likelihood {likelihood.mean().item():.4f}")
            if finished.all():
                break
        # step


if __name__ == "__main__":
    main()
