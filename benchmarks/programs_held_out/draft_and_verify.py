"""Writes text by drafts: the lower layers of a model propose tokens, and the whole model keeps those it agrees to."""

# cpu: --width 256 --heads 4 --layers 6 --vocabulary 4000 --prompt 64 --length 192
# cuda: --width 2048 --heads 16 --layers 16 --vocabulary 32000 --prompt 256 --length 1024

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, length, strength):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear in (self.out, self.down):
            nn.init.normal_(linear.weight, std=strength * 0.02)
        self.register_buffer("keys", torch.zeros(1, heads, length, self.size), persistent=False)
        self.register_buffer("values", torch.zeros(1, heads, length, self.size), persistent=False)

    def forward(self, x, start, mask):
        _, length, width = x.shape
        end = start + length
        q, k, v = self.qkv(self.norm1(x)).view(1, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        y = F.scaled_dot_product_attention(q, self.keys[:, :, :end], self.values[:, :, :end], attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(1, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Writer(nn.Module):
    """A language model of which the first `draft_layers` layers can write on their own."""

    def __init__(self, args):
        super().__init__()
        self.draft_layers = args.draft_layers
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.length, args.width)
        strengths = [1.0 if i < args.draft_layers else 0.1 for i in range(args.layers)]
        self.blocks = nn.ModuleList([Block(args.width, args.heads, args.length, s) for s in strengths])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        causal = torch.ones(args.length, args.length, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)
        self.register_buffer("places", torch.arange(args.length), persistent=False)

    def forward(self, ids, start, draft=False):
        """The most likely token after each of `ids`, the first of which stands at `start`."""
        end = start + ids.shape[1]
        mask = None if ids.shape[1] == 1 else self.causal[start:end, :end]
        x = self.tokens(ids) + self.positions(self.places[start:end])
        for block in self.blocks[: self.draft_layers] if draft else self.blocks:
            x = block(x, start, mask)
        return self.head(self.norm(x)).argmax(-1)


def propose(model, token, start, count):
    """`token` and the `count` tokens that the lower layers write after it."""
    tokens = [token]
    for i in range(count):
        tokens.append(model(tokens[-1], start + i, draft=True))
    return torch.cat(tokens, dim=1)


def verify(model, tokens, start):
    """What the whole model writes after each of `tokens`."""
    # mend: verified-token-by-token
    answers = []
    for i in range(tokens.shape[1]):
        answers.append(model(tokens[:, i : i + 1], start + i))  # waste: verified-token-by-token
    return torch.cat(answers, dim=1)
    # instead: return model(tokens, start)


def agreed(tokens, answers):
    """How many of the proposed tokens the model would have written itself."""
    same = tokens[:, 1:] == answers[:, :-1]
    return int(same.cumprod(1).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--proposals", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024, help="the most tokens of a text, its prompt included")
    parser.add_argument("--steps", type=int, default=100, help="drafts")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        model = Writer(args).eval()
        prompt = torch.randint(args.vocabulary, (1, args.prompt))
    written = kept = 0
    with torch.inference_mode():
        first = model(prompt, 0)[:, -1:]
        token, start = first, args.prompt
        for step in range(args.steps):
            tokens = propose(model, token, start, args.proposals)
            answers = verify(model, tokens, start)
            count = agreed(tokens, answers)
            token = answers[:, count : count + 1]
            start += count + 1
            kept += count
            written += count + 1
            if start + args.proposals + 1 > args.length:  # the text is full: the next one has the same prompt
                token, start = first, args.prompt
            if (step + 1) % 50 == 0:
                share = kept / ((step + 1) * args.proposals)
                print(f"draft {step + 1}: {written} tokens written, {share:.0%} of the proposals kept")
            # step


if __name__ == "__main__":
    main()
