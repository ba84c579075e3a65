"""Fine-tunes an encoder that sends support tickets to the team that answers them."""

# cpu: --width 64 --layers 1 --heads 4 --batch-size 32 --length 64 --tickets 200
# cuda: --width 1024 --layers 6 --batch-size 64 --length 192

import argparse
import random
import re

import torch
import torch.nn.functional as F
from torch import nn

TEAMS = 24
SYLLABLES = [a + b for a in "bcdfghjklmnprstvz" for b in "aeiou"]
UNKNOWN, START, PAD = 0, 1, 2


class WordPieces:
    """Splits words into the longest pieces that the vocabulary has."""

    def __init__(self, seed, size):
        chance = random.Random(seed)
        pieces = {"".join(chance.choices(SYLLABLES, k=chance.randint(1, 3))) for _ in range(size)}
        whole = sorted(pieces | set(SYLLABLES))
        names = ["[UNK]", "[CLS]", "[PAD]", *".,!?", *whole, *("##" + piece for piece in whole)]
        self.ids = {name: number for number, name in enumerate(names)}

    def split(self, word):
        pieces, start = [], 0
        while start < len(word):
            end = len(word)
            while end > start:
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in self.ids:
                    break
                end -= 1
            else:
                return [UNKNOWN]
            pieces.append(self.ids[piece])
            start = end
        return pieces

    def encode(self, text, length):
        ids = [START]
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            ids += self.split(word)
        return ids[:length] + [PAD] * (length - len(ids))


class Tickets:
    """Made-up tickets of long words, and the team that each belongs to."""

    def __init__(self, args, seed=0):
        chance = random.Random(seed)
        self.pieces, self.length = WordPieces(seed, 4000), args.length
        self.texts = []
        for _ in range(args.tickets):
            words = ["".join(chance.choices(SYLLABLES, k=chance.randint(2, 6))) for _ in range(args.length * 2 // 5)]
            self.texts.append(" ".join(words).capitalize() + chance.choice(".!?"))
        self.teams = torch.tensor([chance.randrange(TEAMS) for _ in self.texts])
        # mend: tickets-split-at-every-draw
        # instead: self.ids = torch.tensor([self.pieces.encode(text, self.length) for text in self.texts])

    def __len__(self):
        return len(self.texts)

    def batch(self, picks):
        # mend: tickets-split-at-every-draw
        rows = [self.pieces.encode(self.texts[i], self.length) for i in picks]  # waste: tickets-split-at-every-draw
        return torch.tensor(rows), self.teams[picks]
        # instead: return self.ids[picks], self.teams[picks]


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
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Router(nn.Module):
    def __init__(self, vocabulary, args):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, args.width)
        self.positions = nn.Parameter(torch.randn(args.length, args.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.teams = nn.Linear(args.width, TEAMS)

    def forward(self, ids):
        x = self.blocks(self.tokens(ids) + self.positions)
        return self.teams(self.norm(x[:, 0]))


def to_device(tensor, device):
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tickets", type=int, default=600)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tickets = Tickets(args)
    model = Router(len(tickets.pieces.ids), args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    print(f"{len(tickets)} tickets, {len(tickets.pieces.ids)} pieces, {TEAMS} teams")

    right = torch.zeros((), device=device)
    for step in range(args.steps):
        picks = torch.randint(len(tickets), (args.batch_size,))
        ids, teams = (to_device(tensor, device) for tensor in tickets.batch(picks))
        logits = model(ids)
        loss = F.cross_entropy(logits, teams)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right += (logits.detach().argmax(-1) == teams).sum()
        if (step + 1) % 25 == 0:
            share = right.item() / (25 * args.batch_size)
            print(f"step {step + 1}: loss {loss.item():.3f}, routed right {share:.1%}")
            right.zero_()
        # step


if __name__ == "__main__":
    main()
