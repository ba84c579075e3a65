"""Trains vectors that tell speakers apart, by classes on a sphere with a margin between them."""

# cpu: --width 128 --heads 4 --layers 3 --batch-size 8 --frames 128 --speakers 256 --clips 256
# cuda: --width 1024 --heads 16 --layers 4 --batch-size 128 --frames 400 --speakers 4096 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn

MELS = 80
FOLD = 2
"""Frames that make one place of the transformer."""


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class SpeakerVectors(nn.Module):
    def __init__(self, args, size=256):
        super().__init__()
        self.fold = nn.Linear(FOLD * MELS, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(args.frames // FOLD, args.width))
        self.blocks = nn.Sequential(*[Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.vector = nn.Linear(args.width, size)

    def forward(self, features):
        x = self.fold(features.unflatten(1, (-1, FOLD)).flatten(2)) + self.places
        return self.vector(self.norm(self.blocks(x)).mean(1))


class MarginLoss(nn.Module):
    """Cross entropy of the cosines to all speakers, where the right one has to win by a margin."""

    def __init__(self, size, speakers, margin=0.2, scale=30.0):
        super().__init__()
        self.margin, self.scale = margin, scale
        self.centres = nn.Parameter(torch.randn(speakers, size))

    def forward(self, vectors, speakers):
        cosines = F.linear(F.normalize(vectors, dim=-1), F.normalize(self.centres, dim=-1))
        handicap = torch.full_like(speakers, -self.margin, dtype=cosines.dtype)
        logits = cosines.scatter_add(1, speakers[:, None], handicap[:, None])
        return F.cross_entropy(self.scale * logits, speakers)


class Trained(nn.Module):
    def __init__(self, args, size=256):
        super().__init__()
        self.vectors = SpeakerVectors(args, size)
        self.loss = MarginLoss(size, args.speakers)

    def forward(self, features, speakers):
        return self.loss(self.vectors(features), speakers)


class Clips:
    """Features of clips and who speaks in them, all of it on the device."""

    def __init__(self, args, device, dtype):
        self.features = torch.randn(args.clips, args.frames, MELS, device=device, dtype=dtype)
        self.speakers = torch.randint(args.speakers, (args.clips,), device=device)

    def batch(self, size):
        chosen = torch.randint(len(self.speakers), (size,), device=self.speakers.device)
        return self.features[chosen], self.speakers[chosen]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--speakers", type=int, default=4096)
    parser.add_argument("--clips", type=int, default=8192)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    with device:
        model = Trained(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    loss_of = torch.compile(model) if args.compile else model
    clips = Clips(args, device, torch.bfloat16 if on_gpu else torch.float32)
    mean = torch.zeros((), device=device)
    for step in range(args.steps):
        features, speakers = clips.batch(args.batch_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(features, speakers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.lerp_(loss.detach(), 0.05)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, lately {mean.item():.3f}")
        # step


if __name__ == "__main__":
    main()
