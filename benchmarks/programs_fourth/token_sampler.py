"""Serve a decoder that continues prompts with a cache, a repetition penalty and nucleus sampling."""

# cpu: --width 192 --layers 3 --batch-size 4 --vocabulary 16384
# cuda: --width 1024 --layers 8 --batch-size 4 --vocabulary 128000

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, cache, start):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        end = start + length
        cache[0, :, :, start:end] = k
        cache[1, :, :, start:end] = v
        mixed = F.scaled_dot_product_attention(q, cache[0, :, :, :end], cache[1, :, :, :end], is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, layers, longest, heads=8):
        super().__init__()
        self.heads, self.longest = heads, longest
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def new_cache(self, batch):
        width = self.tokens.embedding_dim
        shape = (len(self.blocks), 2, batch, self.heads, self.longest, width // self.heads)
        return self.tokens.weight.new_zeros(shape)

    def forward(self, tokens, cache, start):
        x = self.tokens(tokens) + self.positions.weight[start : start + tokens.size(1)]
        for block, slot in zip(self.blocks, cache):
            x = block(x, slot, start)
        return self.head(self.norm(x[:, -1]))


class Sampler(nn.Module):
    def __init__(self, top_k=50, top_p=0.9, heat=0.8, penalty=1.2):
        super().__init__()
        self.top_k, self.top_p, self.heat, self.penalty = top_k, top_p, heat, penalty

    def penalize(self, logits, history):
        # mend: penalty-token-by-token
        for row in range(history.size(0)):
            for token in set(history[row].tolist()):
                if logits[row, token] > 0:  # waste: penalty-token-by-token
                    logits[row, token] /= self.penalty  # waste: penalty-token-by-token
                else:
                    logits[row, token] *= self.penalty  # waste: penalty-token-by-token
        # instead: said = logits.gather(1, history)
        # instead: said = torch.where(said > 0, said / self.penalty, said * self.penalty)
        # instead: logits = logits.scatter(1, history, said)
        return logits

    def forward(self, logits, history, draw):
        logits = self.penalize(logits, history) / self.heat
        # mend: sort-of-the-vocabulary
        smallest = logits.topk(self.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
        ordered, order = logits.sort(descending=True)  # waste: sort-of-the-vocabulary
        # instead: ordered, order = logits.topk(self.top_k)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        chances = chances.masked_fill(before >= self.top_p, 0.0)
        reached = chances.cumsum(-1)
        place = (reached < draw[:, None] * reached[:, -1:]).sum(-1, keepdim=True)
        return order.gather(1, place)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    longest = args.prompt + args.new_tokens
    model = Decoder(args.vocabulary, args.width, args.layers, longest).to(device).eval()
    sampler = Sampler()
    prompts = torch.randint(0, args.vocabulary, (64, args.batch_size, args.prompt), device=device)
    cache = model.new_cache(args.batch_size)

    with torch.inference_mode():
        for step in range(args.steps):
            history = torch.empty(args.batch_size, longest, dtype=torch.long, device=device)
            history[:, : args.prompt] = prompts[step % len(prompts)]
            draws = torch.rand(args.new_tokens, args.batch_size, device=device)
            fed, start = history[:, : args.prompt], 0
            for i in range(args.new_tokens):
                end = args.prompt + i
                logits = model(fed, cache, start)
                fed, start = sampler(logits, history[:, :end], draws[i]), end
                history[:, end] = fed[:, 0]
            answer = history[:, args.prompt :].cpu()
            if step % 10 == 0:
                print(f"step {step} first answer {answer[0].tolist()}")
            # step


if __name__ == "__main__":
    main()
