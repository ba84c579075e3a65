"""Draws replies for a help desk: several for each conversation, whose prompts are read once and kept in a cache."""

# cpu: --width 384 --heads 8 --kv-heads 2 --layers 4 --vocabulary 8000 --conversations 8 --prompt 256
# cuda: --width 2048 --heads 16 --kv-heads 4 --layers 8 --vocabulary 32000 --conversations 32 --prompt 2048
# block: 32

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def rotary_tables(length, size, base=10000.0):
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = (torch.arange(length, dtype=torch.float32)[:, None] * frequencies).repeat(1, 2)
    dtype = torch.get_default_dtype()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Attention with fewer heads of keys and values than of queries, and a cache of fixed size."""

    def __init__(self, args, length):
        super().__init__()
        self.heads, self.kv_heads, self.size = args.heads, args.kv_heads, args.width // args.heads
        self.qkv = nn.Linear(args.width, (args.heads + 2 * args.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        shape = (args.conversations, args.kv_heads, length, self.size)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, cos, sin, start):
        batch, length, width = x.shape
        end = start + length
        qkv = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        self.keys[:, :, start:end] = rotate(k, cos, sin)
        self.values[:, :, start:end] = v
        q, k, v = rotate(q, cos, sin), self.keys[:, :, :end], self.values[:, :, :end]
        # mend: heads-repeated
        groups = self.heads // self.kv_heads
        k = k.repeat_interleave(groups, dim=1)  # waste: heads-repeated
        v = v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        # instead: y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, args, length):
        super().__init__()
        hidden = args.width * 11 // 4
        self.norm1, self.norm2 = nn.RMSNorm(args.width), nn.RMSNorm(args.width)
        self.attention = Attention(args, length)
        self.up, self.down = nn.Linear(args.width, 2 * hidden, bias=False), nn.Linear(hidden, args.width, bias=False)

    def forward(self, x, cos, sin, start):
        x = x + self.attention(self.norm1(x), cos, sin, start)
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Assistant(nn.Module):
    def __init__(self, args):
        super().__init__()
        length = args.prompt + args.new_tokens
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList([Block(args, length) for _ in range(args.layers)])
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        cos, sin = rotary_tables(length, args.width // args.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, start):
        """Logits of the token after `ids`, which stand at `start`."""
        x = self.tokens(ids)
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin, start)
        return self.head(self.norm(x[:, -1])).float()


def penalize(logits, history, penalty):
    """Makes tokens that a conversation already has less likely."""
    # mend: penalty-row-by-row
    for row in range(len(logits)):
        seen = history[row].unique()  # waste: penalty-row-by-row
        scores = logits[row, seen]
        logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    # instead: scores = logits.gather(1, history)
    # instead: logits.scatter_(1, history, torch.where(scores > 0, scores / penalty, scores * penalty))
    return logits


def draw(logits, temperature):
    """One token of each row; no wait for the device, as torch.multinomial has one."""
    shares = F.softmax(logits / temperature, dim=-1)
    return (shares / torch.empty_like(shares).exponential_()).argmax(-1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--penalty", type=float, default=1.2)
    parser.add_argument("--steps", type=int, default=128, help="tokens in all")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with device:
        model = Assistant(args).eval()
        history = torch.randint(args.vocabulary, (args.conversations, args.prompt + args.new_tokens))
    with torch.inference_mode():
        first_logits = model(history[:, : args.prompt], 0)
        for step in range(args.steps):
            new = step % args.new_tokens
            end = args.prompt + new
            logits = first_logits.clone() if new == 0 else model(history[:, end - 1 : end], end - 1)
            logits = penalize(logits, history[:, :end], args.penalty)
            history[:, end : end + 1] = draw(logits, args.temperature)
            if new == args.new_tokens - 1:
                print(f"reply {step // args.new_tokens}: {history[0, args.prompt :].tolist()[:8]} ...")
            # step


if __name__ == "__main__":
    main()
