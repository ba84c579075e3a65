"""Answer batches of chat prompts with a grouped-query decoder and a preallocated key/value cache."""

# cpu: --width 256 --layers 3 --batch 4 --window 1024 --prompt 64 --answer 8
# cuda: --width 2048 --layers 8 --batch 16 --window 4096 --prompt 256 --answer 8

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, batch, window):
        super().__init__()
        self.heads, self.kv_heads, self.group, self.size = heads, kv_heads, heads // kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        cache = torch.zeros(2, batch, kv_heads, window, self.size)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x, rotary, mask, start):
        batch, length, _ = x.shape
        end = start + length
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2 * self.kv_heads, self.size).transpose(1, 2).chunk(2, dim=1)
        self.cache[0, :, :, start:end] = rotate(k, rotary)
        self.cache[1, :, :, start:end] = v
        q = rotate(q, rotary)
        k, v = self.cache  # waste: empty-slots-attended
        # instead: k, v = self.cache[:, :, :, :end]
        mask = mask[:, : k.shape[2]]
        # mend: kv-heads-repeated
        k = k.repeat_interleave(self.group, dim=1)  # waste: kv-heads-repeated
        v = v.repeat_interleave(self.group, dim=1)  # waste: kv-heads-repeated
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        # instead: q = q.reshape(batch, self.kv_heads, self.group * length, self.size)
        # instead: y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(self.group, 1))
        # instead: y = y.reshape(batch, self.heads, length, self.size)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, rotary):
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, batch, window):
        super().__init__()
        self.attention = Attention(width, heads, kv_heads, batch, window)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up = nn.Linear(width, 5 * width, bias=False)
        self.down = nn.Linear(5 * width // 2, width, bias=False)

    def forward(self, x, rotary, mask, start):
        x = x + self.attention(self.norm1(x), rotary, mask, start)
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ChatModel(nn.Module):
    def __init__(self, vocab, width, layers, heads, kv_heads, batch, window):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, batch, window) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        size = width // heads
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(window)[:, None] * speeds
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("causal", torch.ones(window, window, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens, start):
        end = start + tokens.shape[1]
        rotary = self.cos[start:end], self.sin[start:end]
        mask = self.causal[start:end]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotary, mask, start)
        return self.head(self.norm(x[:, -1]))


def answer(model, prompt, count):
    token = model(prompt, 0).argmax(dim=-1, keepdim=True)
    tokens = [token]
    for position in range(prompt.shape[1], prompt.shape[1] + count - 1):
        token = model(token, position).argmax(dim=-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8000)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = ChatModel(args.vocab, args.width, args.layers, args.heads, args.kv_heads, args.batch, args.window)
        model = model.to(dtype=dtype).eval()
        prompts = torch.randint(args.vocab, (6, args.batch, args.prompt))

    with torch.inference_mode():
        for step in range(args.steps):
            tokens = answer(model, prompts[step % len(prompts)], args.answer)
            if step % 10 == 0:
                print(f"request {step}: {tokens[0].tolist()}")
            # step


if __name__ == "__main__":
    main()
