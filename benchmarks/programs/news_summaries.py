"""Summarizes articles in batches with an encoder-decoder that never repeats three words in a row."""

# cpu: --width 256 --layers 3 --heads 4 --batch-size 16 --source 128 --vocabulary 4000
# cuda: --width 1024 --layers 6 --batch-size 64 --source 512 --vocabulary 32000
# block: 96

import argparse

import torch
import torch.nn.functional as F
from torch import nn

PAD, START = 0, 1


class Layer(nn.Module):
    """A layer of the encoder, or with `longest` one of the decoder, which keeps keys and values."""

    def __init__(self, args, longest=0):
        super().__init__()
        width, self.heads, self.is_decoder = args.width, args.heads, longest > 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if self.is_decoder:
            self.norm3 = nn.LayerNorm(width)
            self.cross_query, self.cross_out = nn.Linear(width, width), nn.Linear(width, width)
            self.cross_key_value = nn.Linear(width, 2 * width)
            shape = 2, args.batch_size, args.heads, longest, width // args.heads
            self.register_buffer("cache", torch.zeros(shape), persistent=False)
            self.source = None

    def read(self, source):
        """Keeps what the decoder attends to in the article."""
        batch, length, _ = source.shape
        kv = self.cross_key_value(source).view(batch, length, 2, self.heads, -1)
        self.source = kv.permute(2, 0, 3, 1, 4).contiguous()

    def forward(self, x, position=0):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.is_decoder:
            self.cache[0, :, :, position : position + 1] = k
            self.cache[1, :, :, position : position + 1] = v
            k, v = self.cache[:, :, :, : position + 1]
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        if self.is_decoder:
            q = self.cross_query(self.norm3(x)).view(batch, length, self.heads, -1).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, *self.source)
            x = x + self.cross_out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Summarizer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.source_positions = nn.Embedding(args.source, args.width)
        self.positions = nn.Embedding(args.new_tokens, args.width)
        self.encoder = nn.ModuleList([Layer(args) for _ in range(args.layers)])
        self.decoder = nn.ModuleList([Layer(args, args.new_tokens) for _ in range(args.layers)])
        self.source_norm, self.norm = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def read(self, articles):
        x = self.tokens(articles) + self.source_positions.weight
        for layer in self.encoder:
            x = layer(x)
        x = self.source_norm(x)
        for layer in self.decoder:
            layer.read(x)

    def forward(self, ids, position):
        x = self.tokens(ids) + self.positions.weight[position]
        for layer in self.decoder:
            x = layer(x, position)
        return self.head(self.norm(x[:, -1]))


def forbid_repeats(logits, summary):
    """Forbids padding, and tokens that would end three tokens in a row that the summary already has."""
    logits[:, PAD] = float("-inf")
    if summary.shape[1] < 3:
        return logits
    # mend: repeats-looked-up-in-python
    for row, tokens in enumerate(summary.tolist()):  # waste: repeats-looked-up-in-python
        following = {}
        for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
            following.setdefault((first, second), []).append(third)  # waste: repeats-looked-up-in-python
        for token in following.get((tokens[-2], tokens[-1]), []):
            logits[row, token] = float("-inf")
    # instead: triples = summary.unfold(1, 3, 1)
    # instead: seen = (triples[:, :, :2] == summary[:, None, -2:]).all(-1)
    # instead: logits.scatter_(1, torch.where(seen, triples[:, :, 2], PAD), float("-inf"))
    return logits


@torch.inference_mode()
def summarize(model, articles, new_tokens):
    model.read(articles)
    summary = torch.full((len(articles), new_tokens + 1), START, device=articles.device)
    for position in range(new_tokens):
        logits = model(summary[:, position : position + 1], position)
        summary[:, position + 1] = forbid_repeats(logits, summary[:, : position + 1]).argmax(-1)
        # step
    return summary[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--source", type=int, default=512, help="tokens of an article")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of a summary")
    parser.add_argument("--steps", type=int, default=4, help="batches of articles")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Summarizer(args).to(device, dtype).eval()
    for batch in range(args.steps):
        articles = torch.randint(2, args.vocabulary, (args.batch_size, args.source), device=device)
        summaries = summarize(model, articles, args.new_tokens).tolist()
        distinct = sum(len(set(summary)) for summary in summaries) / len(summaries)
        print(f"batch {batch}: {distinct:.0f} distinct tokens of {args.new_tokens}, e.g. {summaries[0][:5]}")


if __name__ == "__main__":
    main()
