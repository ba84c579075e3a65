"""Tunes a writer of headlines on pairs: of two headlines of an article, the one that readers chose is made likelier."""

# cpu: --width 128 --heads 4 --layers 2 --vocabulary 4000 --pairs 4 --article 96 --headline 16
# cuda: --width 1024 --heads 16 --layers 4 --vocabulary 32768 --pairs 16 --article 384 --headline 128

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class HeadlineWriter(nn.Module):
    """A causal language model over an article and the headline after it."""

    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(args.article + args.headline, args.width))
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def hidden(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Votes:
    """Made-up articles with two headlines each, of different lengths: [:, 0] is the one that was chosen."""

    def __init__(self, args, count, device):
        generator = torch.Generator().manual_seed(2)
        length = args.article + args.headline
        ids = torch.randint(args.vocabulary, (count, 2, length), generator=generator)
        ids[:, 1, : args.article] = ids[:, 0, : args.article]
        lengths = torch.randint(args.headline // 2, args.headline + 1, (count, 2, 1), generator=generator)
        places = torch.arange(length) - args.article
        self.ids = ids.to(device)
        self.counted = ((places >= 0) & (places < lengths)).to(device)

    def batch(self, pairs):
        rows = torch.randint(len(self.ids), (pairs,), device=self.ids.device)
        return self.ids[rows].transpose(0, 1).flatten(0, 1), self.counted[rows].transpose(0, 1).flatten(0, 1)


def headline_scores(model, ids, counted, article):
    """The mean logarithm of the probabilities of a headline's tokens, given its article of `article` tokens."""
    hidden, targets, counted = model.hidden(ids)[:, :-1], ids[:, 1:], counted[:, 1:]
    # mend: logits-of-the-article
    logits = model.head(hidden)  # waste: logits-of-the-article
    # instead: targets, counted = targets[:, article - 1 :], counted[:, article - 1 :]
    # instead: logits = model.head(hidden[:, article - 1 :])
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return -(losses * counted).sum(1) / counted.sum(1)


def preference_loss(scores, beta, margin):
    """By how much the chosen headline is likelier than the other one; no reference model is needed."""
    chosen, other = scores.float().chunk(2)
    return -F.logsigmoid(beta * (chosen - other) - margin).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--article", type=int, default=384, help="tokens of an article; longer ones are cut")
    parser.add_argument("--headline", type=int, default=128, help="the most tokens of a headline")
    parser.add_argument("--pairs", type=int, default=16, help="per batch")
    parser.add_argument("--beta", type=float, default=2.0)
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = HeadlineWriter(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    votes = Votes(args, 2000, device)
    average = torch.zeros((), device=device)
    for step in range(args.steps):
        ids, counted = votes.batch(args.pairs)
        scores = headline_scores(model, ids, counted, args.article)
        loss = preference_loss(scores, args.beta, args.margin)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach(), 0.05)
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {average.item():.4f}")
        # step


if __name__ == "__main__":
    main()
