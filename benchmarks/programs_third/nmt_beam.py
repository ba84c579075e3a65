"""Translates batches of sentences with an encoder-decoder transformer and beam search."""

# cpu: --width 160 --layers 3 --heads 4 --vocab 1500 --batch-size 4 --source-len 256 --target-len 16
# cuda: --width 1024 --layers 6 --heads 16 --vocab 16000 --batch-size 64 --source-len 256 --target-len 20

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, past, position):
        rows, _, width = x.shape
        q, k, v = self.qkv(x).view(rows, 1, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        past[0][:, :, position : position + 1] = k
        past[1][:, :, position : position + 1] = v
        y = F.scaled_dot_product_attention(q, past[0][:, :, : position + 1], past[1][:, :, : position + 1])
        return self.out(y.reshape(rows, 1, width))


class CrossAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, source, state):
        sentences, width = source.size(0), source.size(-1)
        q = self.split(self.q(x).view(sentences, -1, width))
        # mend: source-projection
        k = self.split(self.k(source))  # waste: source-projection
        v = self.split(self.v(source))  # waste: source-projection
        # instead: state["k"] = state["k"] if "k" in state else self.split(self.k(source))
        # instead: state["v"] = state["v"] if "v" in state else self.split(self.v(source))
        # instead: k, v = state["k"], state["v"]
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(-1, 1, width))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.self_attention = SelfAttention(width, heads)
        self.cross_attention = CrossAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x, source, state, position):
        x = x + self.self_attention(self.norms[0](x), state["past"], position)
        x = x + self.cross_attention(self.norms[1](x), source, state)
        return x + self.mlp(self.norms[2](x))


class Translator(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_len):
        super().__init__()
        self.width, self.heads = width, heads
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_len, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.relu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.ModuleList([DecoderLayer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def new_states(self, rows, length):
        shape = (2, rows, self.heads, length, self.width // self.heads)
        return [{"past": self.embed.weight.new_zeros(shape)} for _ in self.decoder]

    def encode(self, tokens):
        return self.encoder(self.embed(tokens) + self.position.weight[: tokens.size(1)])

    def forward(self, tokens, source, states, position):
        x = self.embed(tokens).unsqueeze(1) + self.position.weight[position]
        for layer, state in zip(self.decoder, states, strict=False):
            x = layer(x, source, state, position)
        return F.linear(self.norm(x).squeeze(1), self.embed.weight)


def translate(model, sentences, beams, length, eos):
    count = sentences.size(0)
    source = model.encode(sentences)
    states = model.new_states(count * beams, length)
    scores = torch.full((count, beams), -1e9, device=source.device)
    scores[:, 0] = 0.0
    tokens = torch.ones(count * beams, dtype=torch.long, device=source.device)
    history = tokens.new_zeros(count * beams, length)
    done = torch.zeros(count, beams, dtype=torch.bool, device=source.device)
    first_row = torch.arange(count, device=source.device).unsqueeze(1) * beams
    for position in range(length):
        logps = model(tokens, source, states, position).float().log_softmax(-1).view(count, beams, -1)
        vocab = logps.size(-1)
        only_eos = torch.where(torch.arange(vocab, device=source.device) == eos, 0.0, -1e9)
        totals = scores.unsqueeze(-1) + torch.where(done.unsqueeze(-1), only_eos, logps)
        scores, flat = totals.view(count, -1).topk(beams, dim=-1)
        origin = (first_row + flat // vocab).flatten()
        tokens = (flat % vocab).flatten()
        history = history[origin]
        history[:, position] = tokens
        done = done.flatten()[origin].view(count, beams) | (tokens == eos).view(count, beams)
        for state in states:
            state["past"][:, :, :, : position + 1] = state["past"][:, origin, :, : position + 1]
        if position % 8 == 7 and bool(done.all()):
            break
    return history.view(count, beams, length)[:, 0], scores[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--source-len", type=int, default=80)
    parser.add_argument("--target-len", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Translator(args.vocab, args.width, args.layers, args.heads, max(args.source_len, args.target_len))
    nn.init.normal_(model.embed.weight, std=args.width**-0.5)
    model = model.to(device, dtype).eval()
    generator = torch.Generator().manual_seed(8)
    corpus = torch.randint(3, args.vocab, (8, args.batch_size, args.source_len), generator=generator).to(device)

    began = time.perf_counter()
    with torch.inference_mode():
        for step in range(args.steps):
            _output, scores = translate(model, corpus[step % 8], args.beams, args.target_len, eos=2)
            if step % 10 == 0 or step == args.steps - 1:
                best = scores.mean().item()
                print(f"batch {step} mean score {best:.4f} elapsed {time.perf_counter() - began:.2f}s")
            # step


if __name__ == "__main__":
    main()
