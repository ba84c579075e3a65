"""Fine-tunes a decoder language model with low-rank adapters on instruction-like synthetic text."""

# cpu: --width 384 --layers 4 --heads 6 --rank 8 --vocab 2000 --batch-size 4 --seq-len 64
# cuda: --width 2048 --layers 8 --heads 16 --rank 16 --vocab 32000 --batch-size 8 --seq-len 512

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, in_features, out_features, rank, alpha=16.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * in_features**-0.5, requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, in_features) * in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        # mend: adapter-merge
        weight = self.weight + self.scale * (self.lora_b @ self.lora_a)  # waste: adapter-merge
        return F.linear(x, weight)
        # instead: update = F.linear(F.linear(x, self.lora_a), self.lora_b)
        # instead: return F.linear(x, self.weight) + self.scale * update


class Attention(nn.Module):
    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.qkv = LoRALinear(width, 3 * width, rank)
        self.out = LoRALinear(width, width, rank)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class SwiGLU(nn.Module):
    def __init__(self, width, hidden, rank):
        super().__init__()
        self.gate_up = LoRALinear(width, 2 * hidden, rank)
        self.down = LoRALinear(hidden, width, rank)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width, heads, rank):
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attn = Attention(width, heads, rank)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, 8 * width // 3, rank)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, rank, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList([Block(width, heads, rank) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def freeze_base(model, dtype):
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def make_corpus(count, seq_len, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(vocab, (count, 1), generator=generator)
    stride = torch.randint(1, 7, (count, 1), generator=generator)
    tokens = (start + stride * torch.arange(seq_len + 1)) % vocab
    prompt = torch.randint(4, seq_len // 4, (count, 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(seq_len) < prompt, -100)
    return tokens[:, :-1].contiguous(), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base_dtype = torch.bfloat16 if device == "cuda" else torch.float32

    with torch.device(device):
        model = Decoder(args.vocab, args.width, args.layers, args.heads, args.rank, args.seq_len)
    freeze_base(model, base_dtype)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=args.lr, weight_decay=0.0, fused=True)

    tokens, labels = make_corpus(args.batch_size * 16, args.seq_len, args.vocab, seed=1)
    tokens, labels = tokens.to(device), labels.to(device)

    began = time.perf_counter()
    for step in range(args.steps):
        start = (step % 16) * args.batch_size
        x, y = tokens[start : start + args.batch_size], labels[start : start + args.batch_size]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f} elapsed {time.perf_counter() - began:.2f}s")
        # step


if __name__ == "__main__":
    main()
