"""Translate batches of sentences with an encoder-decoder transformer and beam search over key/value caches."""

# cpu: --width 128 --layers 3 --sentences 2 --source 320 --tokens 16 --vocab 4000
# cuda: --width 1024 --layers 4 --sentences 16 --source 1024 --tokens 8 --vocab 32000

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

HEADS = 8


def split_heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class DecoderLayer(nn.Module):
    def __init__(self, width, max_tokens):
        super().__init__()
        self.max_tokens = max_tokens
        self.qkv = nn.Linear(width, 3 * width)
        self.self_out = nn.Linear(width, width)
        self.cross_q = nn.Linear(width, width)
        self.cross_kv = nn.Linear(width, 2 * width)
        self.cross_out = nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def start(self, memory, beams):
        keys, values = self.cross_kv(memory).chunk(2, dim=-1)
        self.cross_k = split_heads(keys).repeat_interleave(beams, dim=0)
        self.cross_v = split_heads(values).repeat_interleave(beams, dim=0)
        rows, heads, _, size = self.cross_k.shape
        self.k = memory.new_zeros(rows, heads, self.max_tokens, size)
        self.v = memory.new_zeros(rows, heads, self.max_tokens, size)

    def reorder(self, order, length):
        self.k[:, :, :length] = self.k[:, :, :length].index_select(0, order)
        self.v[:, :, :length] = self.v[:, :, :length].index_select(0, order)
        # mend: cross-cache-reordered
        self.cross_k = self.cross_k.index_select(0, order)  # waste: cross-cache-reordered
        self.cross_v = self.cross_v.index_select(0, order)  # waste: cross-cache-reordered
        # instead:

    def forward(self, x, position):
        q, k, v = (split_heads(part) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        self.k[:, :, position : position + 1] = k
        self.v[:, :, position : position + 1] = v
        y = F.scaled_dot_product_attention(q, self.k[:, :, : position + 1], self.v[:, :, : position + 1])
        x = x + self.self_out(y.transpose(1, 2).flatten(2))
        q = split_heads(self.cross_q(self.norms[1](x)))
        y = F.scaled_dot_product_attention(q, self.cross_k, self.cross_v)
        x = x + self.cross_out(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.norms[2](x))


class Translator(nn.Module):
    def __init__(self, vocab, width, layers, source, tokens):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.source_positions = nn.Parameter(0.02 * torch.randn(source, width))
        self.target_positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(width, HEADS, 2 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(DecoderLayer(width, tokens) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def start(self, source, beams):
        memory = self.encoder(self.embed(source) + self.source_positions)
        for layer in self.decoder:
            layer.start(memory, beams)

    def step(self, tokens, position):
        x = self.embed(tokens)[:, None] + self.target_positions[position]
        for layer in self.decoder:
            x = layer(x, position)
        return F.log_softmax(self.head(self.norm(x[:, 0])).float(), dim=-1)

    def reorder(self, order, length):
        for layer in self.decoder:
            layer.reorder(order, length)


def beam_search(model, source, beams, max_tokens, penalty):
    sentences, device = source.shape[0], source.device
    rows = sentences * beams
    model.start(source, beams)
    tokens = torch.ones(rows, 1, dtype=torch.long, device=device)
    totals = torch.full((sentences, beams), -1e9, device=device)
    totals[:, 0] = 0.0
    first_row = torch.arange(sentences, device=device)[:, None] * beams
    for position in range(max_tokens):
        scores = model.step(tokens[:, -1], position)
        # mend: penalty-row-loop
        for row in range(rows):
            for seen in set(tokens[row].tolist()):  # waste: penalty-row-loop
                scores[row, seen] *= penalty  # waste: penalty-row-loop
        # instead: scores = scores.scatter(1, tokens, scores.gather(1, tokens) * penalty)
        vocab = scores.shape[1]
        sums = (totals.view(rows, 1) + scores).view(sentences, beams * vocab)
        totals, choice = sums.topk(beams, dim=1)
        order = (first_row + choice // vocab).view(-1)
        tokens = torch.cat([tokens[order], (choice % vocab).view(-1, 1)], dim=1)
        model.reorder(order, position + 1)
    return tokens.view(sentences, beams, -1)[:, 0, 1:], totals[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=2)
    parser.add_argument("--source", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=4000)
    parser.add_argument("--beams", type=int, default=4)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Translator(args.vocab, args.width, args.layers, args.source, args.tokens).to(device).eval()
    requests = torch.randint(2, args.vocab, (8, args.sentences, args.source), device=device)

    with torch.inference_mode():
        for step in range(args.steps):
            best, score = beam_search(model, requests[step % len(requests)], args.beams, args.tokens, 1.2)
            if step % 10 == 0:
                print(f"request {step}: score {score.mean().item():.4f}, first tokens {best[0, :5].tolist()}")
            # step


if __name__ == "__main__":
    main()
