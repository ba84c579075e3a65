"""Writes down batches of dictated notes: an encoder listens once, a decoder writes one piece of a word at a time."""

# cpu: --width 256 --heads 4 --layers 2 --clips 8 --frames 800 --pieces 32 --vocabulary 2048
# cuda: --width 1024 --heads 16 --layers 6 --clips 32 --frames 3000 --pieces 32
# block: 32

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

MELS = 80
START = 1


class Listening(nn.Module):
    """A layer of the encoder."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Writing(nn.Module):
    """A layer of the decoder, which keeps keys and values of what is written."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ask, self.heard, self.told = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.keys = self.values = None
        self.sounds = None

    def listen(self, clips, pieces, like):
        """Forgets the last clips, and makes room for the pieces of new ones."""
        shape = (clips, self.heads, pieces, like.shape[-1] // self.heads)
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.sounds = None

    def forward(self, x, frames, place):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        self.keys[:, :, place : place + 1] = k
        self.values[:, :, place : place + 1] = v
        y = F.scaled_dot_product_attention(q, self.keys[:, :, : place + 1], self.values[:, :, : place + 1])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        q = self.ask(self.norm2(x)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        # mend: frames-projected-for-every-piece
        k, v = (
            self.heard(frames)
            .unflatten(2, (2, self.heads, -1))
            .permute(  # waste: frames-projected-for-every-piece
                2, 0, 3, 1, 4
            )
        )
        # instead: if self.sounds is None:
        # instead:     self.sounds = self.heard(frames).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # instead: k, v = self.sounds
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.told(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm3(x))


class Stenographer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.fold = nn.Linear(2 * MELS, args.width)
        self.moments = nn.Parameter(0.02 * torch.randn(args.frames // 2, args.width))
        self.encoder = nn.ModuleList([Listening(args.width, args.heads) for _ in range(args.layers)])
        self.heard = nn.LayerNorm(args.width)
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(args.pieces, args.width))
        self.decoder = nn.ModuleList([Writing(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def encode(self, clips):
        x = self.fold(clips.unflatten(1, (-1, 2)).flatten(2)) + self.moments
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            layer.listen(len(clips), len(self.places), x)
        return self.heard(x)

    def write(self, last, frames, place):
        """The likeliest next piece of each clip."""
        x = self.words(last) + self.places[place]
        for layer in self.decoder:
            x = layer(x, frames, place)
        return self.head(self.norm(x)).argmax(-1)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--clips", type=int, default=32)
    parser.add_argument("--frames", type=int, default=3000, help="frames of a clip; the encoder folds two into one")
    parser.add_argument("--pieces", type=int, default=32)
    parser.add_argument("--steps", type=int, default=192, help="pieces to write in all")
    return parser.parse_args()


@torch.inference_mode()
def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Stenographer(args).to(dtype).eval()
    dictated = torch.randn(4, args.clips, args.frames, MELS, device=device, dtype=dtype)
    started, done, steps = time.perf_counter(), 0, 0
    while steps < args.steps:
        frames = model.encode(dictated[done % len(dictated)])
        written = torch.full((args.clips, args.pieces + 1), START, device=device)
        for place in range(args.pieces):
            written[:, place + 1 : place + 2] = model.write(written[:, place : place + 1], frames, place)
            steps += 1
            # step
        notes = written[:, 1:].tolist()
        done += 1
        if done % 4 == 0:
            speed = steps * args.clips / (time.perf_counter() - started)
            print(f"{done * args.clips} notes, {speed:.0f} pieces/s: {notes[0][:6]}...")


if __name__ == "__main__":
    main()
