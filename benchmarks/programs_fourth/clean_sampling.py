"""Generate text for batches of prompts with cached keys and values, top-k sampling and an early stop."""

# cpu: --width 256 --layers 4 --batch 4 --prompt 96 --new-tokens 12
# cuda: --width 2048 --layers 8 --batch 32 --prompt 512 --new-tokens 16

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

END = 0


class Block(nn.Module):
    def __init__(self, width, heads, batch, length):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        shape = batch, heads, length, width // heads
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, start):
        batch, length, width = x.shape
        end = start + length
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        y = F.scaled_dot_product_attention(
            q, self.keys[:, :, :end], self.values[:, :, :end], is_causal=start == 0 and length > 1
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.ff(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab, width, layers, heads, batch, length):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, batch, length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("index", torch.arange(length), persistent=False)

    def forward(self, tokens, start):
        """Scores of the token after the last one."""
        x = self.embed(tokens) + self.positions(self.index[start : start + tokens.shape[1]])
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x[:, -1]))


def sample(scores, count, temperature):
    best, indices = scores.float().topk(count, dim=-1)
    chosen = torch.multinomial((best / temperature).softmax(dim=-1), 1)
    return indices.gather(1, chosen)


def generate(model, prompt, new_tokens, count=40, temperature=0.8):
    batch, length = prompt.shape
    tokens = prompt.new_full((batch, new_tokens), END)
    ended = torch.zeros(batch, 1, dtype=torch.bool, device=prompt.device)
    token, start = prompt, 0
    for position in range(new_tokens):
        scores = model(token, start)
        start = length + position
        token = sample(scores, count, temperature).masked_fill(ended, END)
        tokens[:, position : position + 1] = token
        ended |= token == END
        if position % 8 == 7 and ended.all():
            break
    return tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=10000)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    length = args.prompt + args.new_tokens
    with torch.device(device):
        model = LanguageModel(args.vocab, args.width, args.layers, args.heads, args.batch, length)
        model = model.to(dtype).eval()
        prompts = torch.randint(1, args.vocab, (8, args.batch, args.prompt))

    with torch.inference_mode():
        for step in range(args.steps):
            tokens = generate(model, prompts[step % len(prompts)], args.new_tokens)
            if step % 10 == 0:
                print(f"request {step}: {tokens[0, :8].tolist()}")
            # step


if __name__ == "__main__":
    main()
