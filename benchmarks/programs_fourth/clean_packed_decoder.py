"""Train a rotary decoder on packed documents that cannot see each other; measure a held-out loss now and then."""

# cpu: --width 128 --layers 3 --batch-size 2 --length 160
# cuda: --width 1024 --layers 8 --batch-size 8 --length 1024
# block: 15

import argparse

import torch
from torch import nn
from torch.nn import functional as F


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, mask, cos, sin):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, layers, length, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("causal", torch.ones(length, length).tril().bool(), persistent=False)

    def forward(self, tokens, documents):
        x = self.tokens(tokens)
        mask = ((documents[:, :, None] == documents[:, None]) & self.causal)[:, None]
        for block in self.blocks:
            x = block(x, mask, self.cos, self.sin)
        return self.head(self.norm(x))


def pack(count, length, vocabulary, device):
    """Rows of short counting documents, with the number of its document for every token."""
    breaks = torch.rand(count, length, device=device) < 0.03
    documents = breaks.cumsum(1)
    starts = torch.randint(0, vocabulary, (count, length), device=device)
    tokens = (starts.gather(1, documents) + torch.arange(length, device=device)) % vocabulary
    return tokens, documents


def token_loss(model, tokens, documents, device):
    inputs, inside = tokens[:, :-1], documents[:, :-1]
    targets = tokens[:, 1:].masked_fill(documents[:, 1:] != inside, -100)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = model(inputs, inside)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


@torch.no_grad()
def evaluate(model, tokens, documents, batch_size, device):
    model.eval()
    losses = [token_loss(model, *both, device) for both in zip(tokens.split(batch_size), documents.split(batch_size))]
    model.train()
    return torch.stack(losses).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, documents = pack(512, args.length + 1, args.vocabulary, device)
    held = 2 * args.batch_size
    model = Decoder(args.vocabulary, args.width, args.layers, args.length, max(4, args.width // 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

    for step in range(args.steps):
        total = torch.zeros((), device=device)
        for _ in range(args.micro_batches):
            rows = torch.randint(held, tokens.size(0), (args.batch_size,), device=device)
            loss = token_loss(model, tokens[rows], documents[rows], device) / args.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 15 == 14:
            unseen = evaluate(model, tokens[:held], documents[:held], args.batch_size, device)
            print(f"step {step} loss {total.item():.4f} held out {unseen.item():.4f}")
        # step


if __name__ == "__main__":
    main()
