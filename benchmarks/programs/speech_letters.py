"""Trains a transformer that writes down speech as letters, by connectionist temporal classification (CTC)."""

# cpu: --width 96 --heads 4 --layers 2 --batch-size 4 --frames 400 --letters 24
# cuda: --width 512 --heads 8 --layers 8 --batch-size 32 --frames 1600 --letters 80

import argparse

import torch
import torch.nn.functional as F
from torch import nn

LETTERS = "_ abcdefghijklmnopqrstuvwxyz'"
"""The letters that are written; the first one is the blank of CTC."""
MELS = 80


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, spoken):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # mend: attention-by-hand
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # waste: attention-by-hand
        scores = scores.masked_fill(~spoken, -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)  # waste: attention-by-hand
        y = weights @ v
        # instead: y = F.scaled_dot_product_attention(q, k, v, attn_mask=spoken)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, spoken):
        x = x + self.attention(self.norm1(x), spoken)
        return x + self.mlp(self.norm2(x))


class Recognizer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.fold = nn.Linear(4 * MELS, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(args.frames // 4, args.width))
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, len(LETTERS))

    def forward(self, features, lengths):
        """Logits for every four frames, of which `lengths` are spoken."""
        batch, frames, _ = features.shape
        x = self.fold(features.view(batch, frames // 4, -1)) + self.positions
        spoken = (torch.arange(frames // 4, device=x.device) < lengths[:, None])[:, None, None]
        for block in self.blocks:
            x = block(x, spoken)
        return self.head(self.norm(x))


def write_down(best):
    """The text of the likeliest letters: repeated ones once, blanks left out."""
    text, last = [], 0
    # mend: letters-read-one-by-one
    for frame in range(len(best)):
        letter = best[frame].item()  # waste: letters-read-one-by-one
        # instead: for letter in best.tolist():
        if letter != 0 and letter != last:
            text.append(LETTERS[letter])
        last = letter
    return "".join(text)


class Utterances:
    """Batches of features with their texts; some utterances are shorter than others."""

    def __init__(self, args, device, dtype, batches=4):
        shape = (batches, args.batch_size)
        self.features = torch.randn(*shape, args.frames, MELS, device=device, dtype=dtype)
        self.texts = torch.randint(1, len(LETTERS), (*shape, args.letters), device=device)
        self.frames = torch.randint(args.frames // 5, args.frames // 4 + 1, shape)
        self.lengths = self.frames.to(device)
        self.letters = tuple([args.letters] * args.batch_size)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--frames", type=int, default=1600)
    parser.add_argument("--letters", type=int, default=80)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Recognizer(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    data = Utterances(args, device, dtype)
    written = 0

    for step in range(args.steps):
        batch = step % len(data.features)
        logits = model(data.features[batch], data.lengths[batch])
        chances = logits.float().log_softmax(-1).transpose(0, 1)
        frames = tuple(data.frames[batch].tolist())
        loss = F.ctc_loss(chances, data.texts[batch], frames, data.letters, zero_infinity=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        text = write_down(logits[0, : frames[0]].argmax(-1))
        written += len(text)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {written / (step + 1):.1f} letters written: {text[:60]}")
        # step


if __name__ == "__main__":
    main()
