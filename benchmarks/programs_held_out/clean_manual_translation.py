"""Trains a transformer that translates pages of manuals; each example is filled with sentences up to its length."""

# cpu: --width 192 --heads 4 --layers 2 --batch-size 4 --length 64 --vocabulary 2048
# cuda: --width 2048 --heads 16 --layers 2 --batch-size 32 --length 256 --vocabulary 32768 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn

START = 1


class SelfAttention(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, source):
        q = self.q(self.norm(x)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(source).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Encoder(nn.Module):
    def __init__(self, width, heads, layers):
        super().__init__()
        parts = [part for _ in range(layers) for part in (SelfAttention(width, heads, False), FeedForward(width))]
        self.parts = nn.Sequential(*parts, nn.LayerNorm(width))

    def forward(self, x):
        return self.parts(x)


class DecoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.written = SelfAttention(width, heads, True)
        self.read = CrossAttention(width, heads)
        self.feed_forward = FeedForward(width)

    def forward(self, x, source):
        return self.feed_forward(self.read(self.written(x), source))


class Translator(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(args.length, args.width))
        self.encoder = Encoder(args.width, args.heads, args.layers)
        self.decoder = nn.ModuleList([DecoderLayer(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, source, target, wanted):
        x = self.encoder(self.words(source) + self.places)
        y = self.words(target) + self.places
        for layer in self.decoder:
            y = layer(y, x)
        logits = self.head(self.norm(y))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Translator(args).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=True)
    translate = torch.compile(model) if args.compile else model

    shape = (64, args.batch_size, args.length + 1)
    sources = torch.randint(2, args.vocabulary, shape, device=device)[..., 1:].contiguous()
    targets = torch.randint(2, args.vocabulary, shape, device=device)
    targets[..., 0] = START
    for step in range(args.steps):
        target = targets[step % len(targets)]
        loss = translate(sources[step % len(sources)], target[:, :-1], target[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
