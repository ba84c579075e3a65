"""Pretrain an encoder with bucketed relative position biases on masked tokens."""

# cpu: --width 128 --layers 3 --batch-size 4 --length 192 --vocabulary 8192
# cuda: --width 768 --layers 6 --batch-size 32 --length 512 --vocabulary 32768

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

IGNORE = -100


class RelativeBias(nn.Module):
    def __init__(self, heads, length, buckets=32, furthest=128):
        super().__init__()
        self.length = length
        self.table = nn.Embedding(buckets, heads)
        distance = torch.arange(1 - length, length)
        half, exact = buckets // 2, buckets // 4
        size = distance.abs()
        log = torch.log(size.clamp(min=1) / exact) / math.log(furthest / exact) * (half - exact)
        bucket = torch.where(size < exact, size, (exact + log.long()).clamp(max=half - 1))
        bucket = bucket + half * (distance > 0)
        positions = torch.arange(length)
        self.register_buffer("by_distance", bucket, persistent=False)
        self.register_buffer("by_pair", bucket[positions[None] - positions[:, None] + length - 1], persistent=False)

    def forward(self):
        bias = self.table(self.by_pair).permute(2, 0, 1).contiguous()  # waste: lookup-of-every-pair
        # instead: bias = self.table(self.by_distance).mT.unfold(1, self.length, 1).flip(1)
        return bias


class Layer(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.bias = RelativeBias(heads, length)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias().to(q.dtype)[None])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class MaskedEncoder(nn.Module):
    def __init__(self, vocabulary, width, layers, length, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.layers = nn.ModuleList(Layer(width, heads, length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        wanted = labels.flatten()
        # mend: head-on-every-position
        logits = self.head(self.norm(x))  # waste: head-on-every-position
        loss = F.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=IGNORE)  # waste: head-on-every-position
        # instead: rows = (wanted != IGNORE).nonzero().squeeze(1)
        # instead: logits = self.head(self.norm(x.flatten(0, 1)[rows]))
        # instead: loss = F.cross_entropy(logits, wanted[rows])
        return loss


def mask_tokens(tokens, mask_id, share=0.15):
    """Hide a share of every row and label only what is hidden."""
    count = int(tokens.size(1) * share)
    hidden = torch.rand(tokens.shape, device=tokens.device).topk(count, dim=1).indices
    labels = torch.full_like(tokens, IGNORE).scatter(1, hidden, tokens.gather(1, hidden))
    return tokens.scatter(1, hidden, mask_id), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=8192)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = torch.randint(0, args.vocabulary, (2048, args.length), device=device)
    texts[:, 1::2] = (texts[:, ::2][:, : args.length // 2] * 7 + 3) % args.vocabulary

    heads = max(4, args.width // 64)
    model = MaskedEncoder(args.vocabulary, args.width, args.layers, args.length, heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    for step in range(args.steps):
        rows = torch.randint(0, texts.size(0), (args.batch_size,), device=device)
        tokens, labels = mask_tokens(texts[rows], args.vocabulary)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
