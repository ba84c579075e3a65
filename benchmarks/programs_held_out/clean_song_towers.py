"""Trains two towers that recommend songs: one for what a listener heard, one for the sound of a song."""

# cpu: --features 128 --width 512 --layers 2 --batch-size 256 --listeners 5000
# cuda: --features 512 --width 4096 --layers 2 --batch-size 8192 --listeners 200000 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    """Vectors of length 1 from vectors of features."""

    def __init__(self, features, width, layers, outputs):
        super().__init__()
        self.start = nn.Linear(features, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.end = nn.Linear(width, outputs)

    def forward(self, x):
        x = F.relu(self.start(x), inplace=True)
        for layer in self.layers:
            x = F.relu(layer(x), inplace=True)
        return F.normalize(self.end(x), dim=-1)


class Recommender(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.listeners = Tower(args.features, args.width, args.layers, args.outputs)
        self.songs = Tower(args.features, args.width, args.layers, args.outputs)
        self.temperature = args.temperature

    def forward(self, listeners, songs):
        """The loss: a listener's own next song is to be nearer than the songs of the others in the batch."""
        scores = self.listeners(listeners) @ (self.songs(songs) / self.temperature).T
        own = torch.arange(len(scores), device=scores.device)
        return F.cross_entropy(scores, own)


class Plays:
    """Made-up listeners, each with the mean sound of the songs heard and the song played next; all on the device."""

    def __init__(self, args, device, dtype):
        generator = torch.Generator(device).manual_seed(6)
        shape = (args.listeners, args.features)
        self.heard = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        self.played = torch.randn(shape, generator=generator, device=device, dtype=dtype).add_(self.heard)

    def batch(self, size):
        rows = torch.randint(len(self.heard), (size,), device=self.heard.device)
        return self.heard[rows], self.played[rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--listeners", type=int, default=200_000)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Recommender(args).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    if args.compile:
        model = torch.compile(model)
    plays = Plays(args, device, dtype)
    average = torch.zeros((), device=device)
    for step in range(args.steps):
        loss = model(*plays.batch(args.batch_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach().float(), 0.05)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {average.item():.3f}")
        # step


if __name__ == "__main__":
    main()
