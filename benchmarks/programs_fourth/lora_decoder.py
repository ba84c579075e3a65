"""Fine-tune a frozen decoder with low-rank adapters in its projections, accumulating over micro-batches."""

# cpu: --width 320 --layers 3 --batch-size 1 --length 64
# cuda: --width 2048 --layers 6 --batch-size 4 --length 512

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs, rank=8, alpha=16):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def forward(self, x):
        # mend: adapter-through-full-weight
        weight = self.base.weight + self.scale * (self.up @ self.down)  # waste: adapter-through-full-weight
        y = F.linear(x, weight)  # waste: adapter-through-full-weight
        # instead: y = self.base(x) + F.linear(F.linear(x, self.down), self.up) * self.scale
        return y


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.query, self.key, self.value = (LoraLinear(width, width) for _ in range(3))
        self.out = LoraLinear(width, width)
        self.gate, self.up = LoraLinear(width, 3 * width), LoraLinear(width, 3 * width)
        self.down = LoraLinear(3 * width, width)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        h = self.norm1(x)
        shape = (batch, length, self.heads, width // self.heads)
        q = rotate(self.query(h).view(shape).transpose(1, 2), cos, sin)
        k = rotate(self.key(h).view(shape).transpose(1, 2), cos, sin)
        v = self.value(h).view(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, layers, length, heads=8):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=2048)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = torch.randint(0, args.vocabulary, (512, args.length + 1), device=device)
    model = Decoder(args.vocabulary, args.width, args.layers, args.length).to(device)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=2e-4, fused=True)

    for step in range(args.steps):
        total = torch.zeros((), device=device)
        for _ in range(args.micro_batches):
            batch = texts[torch.randint(0, texts.size(0), (args.batch_size,), device=device)]
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / args.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step} loss {total.item():.4f}")
        # step


if __name__ == "__main__":
    main()
