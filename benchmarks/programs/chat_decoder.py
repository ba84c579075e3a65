"""Answers a batch of prompts with a decoder that keeps the keys and values of earlier tokens."""

# cpu: --width 256 --layers 4 --batch-size 8 --prompt 384 --new-tokens 400 --vocabulary 4000
# cuda: --width 1024 --layers 8 --batch-size 64 --prompt 2048 --new-tokens 1500

import argparse

import torch
import torch.nn.functional as F
from torch import nn

END = 0
"""The token that ends an answer."""


class Attention(nn.Module):
    def __init__(self, width, heads, longest):
        super().__init__()
        self.heads, self.longest = heads, longest
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.keys = self.values = None

    def forward(self, x, position):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # mend: cache-grown-by-cat
        if position > 0:
            k = torch.cat([self.keys, k], dim=2)  # waste: cache-grown-by-cat
            v = torch.cat([self.values, v], dim=2)  # waste: cache-grown-by-cat
        self.keys, self.values = k, v
        # instead: if position == 0:
        # instead:     self.keys = k.new_empty(batch, self.heads, self.longest, k.shape[-1])
        # instead:     self.values = torch.empty_like(self.keys)
        # instead: self.keys[:, :, position : position + length] = k
        # instead: self.values[:, :, position : position + length] = v
        # instead: k, v = self.keys[:, :, : position + length], self.values[:, :, : position + length]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=position == 0)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, longest):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, longest)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, position):
        x = x + self.attention(self.norm1(x), position)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        longest = args.prompt + args.new_tokens
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(longest, args.width)
        self.blocks = nn.ModuleList([Block(args.width, args.heads, longest) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, ids, position):
        x = self.tokens(ids) + self.positions.weight[position : position + ids.shape[1]]
        for block in self.blocks:
            x = block(x, position)
        return self.head(self.norm(x[:, -1]))


@torch.inference_mode()
def answer(model, prompts, new_tokens):
    """The prompts with tokens that are appended one at a time."""
    ids, position = prompts, 0
    answers = [prompts]
    ended = torch.zeros(len(prompts), 1, dtype=torch.bool, device=prompts.device)
    for _ in range(new_tokens):
        logits = model(ids, position)
        position += ids.shape[1]
        ids = logits.argmax(-1, keepdim=True)
        answers.append(ids)
        ended |= ids == END
        if ended.all():  # waste: end-asked-every-token
            # instead: if len(answers) % 32 == 0 and ended.all():
            break
        # step
    return torch.cat(answers, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1, help="batches of prompts")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Decoder(args).to(device, dtype).eval()
    for step in range(args.steps):
        prompts = torch.randint(1, args.vocabulary, (args.batch_size, args.prompt), device=device)
        answers = answer(model, prompts, args.new_tokens)
        print(f"batch {step}: {answers.shape[1]} tokens, the last ones {answers[0, -4:].tolist()}")


if __name__ == "__main__":
    main()
