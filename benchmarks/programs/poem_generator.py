"""Continues the first lines of poems with a decoder-only transformer."""

# cpu: --width 192 --layers 3 --batch-size 2 --prompt 128 --new-tokens 160 --vocabulary 4000
# cuda: --width 1024 --layers 8 --batch-size 16 --prompt 768 --new-tokens 600

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, cache, position):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, position : position + length] = k
            cache[1, :, :, position : position + length] = v
            k, v = cache[:, :, :, : position + length]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)  # waste: no-cache
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cache=None, position=0):
        x = x + self.attention(self.norm1(x), cache, position)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Poet(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.prompt + args.new_tokens, args.width)
        self.layers = nn.ModuleList([Layer(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, ids, caches=None, position=0):
        """The logits of the next token; with caches, `ids` are the tokens from `position` on."""
        x = self.tokens(ids) + self.positions.weight[position : position + ids.shape[1]]
        for number, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[number], position)
        return self.head(self.norm(x[:, -1]))


def make_caches(args, device, dtype):
    longest, size = args.prompt + args.new_tokens, args.width // args.heads
    return torch.empty(args.layers, 2, args.batch_size, args.heads, longest, size, device=device, dtype=dtype)


@torch.no_grad()
def continue_poem(model, ids, args):
    # mend: no-cache
    # instead: caches = make_caches(args, ids.device, model.head.weight.dtype)
    # instead: known = 0
    for _ in range(args.new_tokens):
        # mend: no-cache
        logits = model(ids)  # waste: no-cache
        # instead: logits = model(ids[:, known:], caches, known)
        # instead: known = ids.shape[1]
        scores, best = torch.topk(logits / args.temperature, args.top_k)
        drawn = torch.multinomial(F.softmax(scores, dim=-1), 1)
        ids = torch.cat([ids, best.gather(1, drawn)], dim=1)
        # step
    return ids


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=768)
    parser.add_argument("--new-tokens", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1, help="batches of poems")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Poet(args).to(device, dtype).eval()
    for step in range(args.steps):
        lines = torch.randint(args.vocabulary, (args.batch_size, args.prompt), device=device)
        poems = continue_poem(model, lines, args)
        print(f"poems {step}: {tuple(poems.shape)}")


if __name__ == "__main__":
    main()
