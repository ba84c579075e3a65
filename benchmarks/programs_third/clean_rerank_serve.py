"""Serves a cross-encoder that scores query-passage texts, packing each request into batches of similar length."""

# cpu: --width 192 --layers 3 --heads 6 --vocab 8000 --texts 24 --max-len 96 --token-budget 1024
# cuda: --width 1024 --layers 12 --heads 16 --vocab 30000 --texts 256 --max-len 512 --token-budget 32768

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, mask):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CrossEncoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.position = nn.Embedding(max_len, width)
        self.layers = nn.ModuleList([EncoderLayer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, 1)

    def forward(self, tokens):
        mask = (tokens != 0)[:, None, None, :]
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, mask)
        return self.score(self.norm(x[:, 0])).squeeze(-1)


def length_batches(texts, token_budget):
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    group = []
    for i in order:
        if group and len(texts[i]) * (len(group) + 1) > token_budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


class RerankService:
    def __init__(self, model, device, token_budget):
        self.model = model
        self.device = device
        self.token_budget = token_budget

    def upload(self, texts):
        tokens = pad_sequence(texts, batch_first=True)
        if self.device == "cuda":
            return tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens

    def rank(self, texts):
        order, parts = [], []
        for group in length_batches(texts, self.token_budget):
            parts.append(self.model(self.upload([texts[i] for i in group])))
            order.extend(group)
        scores = torch.empty(len(texts))
        scores[torch.tensor(order)] = torch.cat(parts).float().cpu()
        return scores.sort(descending=True)


def make_request(texts, max_len, vocab, generator):
    lengths = torch.randint(max_len // 6, max_len + 1, (texts,), generator=generator).tolist()
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--max-len", type=int, default=96)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = CrossEncoder(args.vocab, args.width, args.layers, args.heads, args.max_len).to(dtype).eval()
    service = RerankService(model, device, args.token_budget)
    generator = torch.Generator().manual_seed(25)
    requests = [make_request(args.texts, args.max_len, args.vocab, generator) for _ in range(8)]

    ranked = 0
    began = time.perf_counter()
    with torch.inference_mode():
        for step in range(args.steps):
            scores, order = service.rank(requests[step % len(requests)])
            ranked += len(order)
            if step % 10 == 0 or step == args.steps - 1:
                rate = ranked / (time.perf_counter() - began)
                print(f"request {step} best {int(order[0])} score {scores[0]:.5f} {rate:.0f} texts/s")
            # step


if __name__ == "__main__":
    main()
