"""Serves sentence embeddings in large batches, sorted by length, as it should be done."""

# cpu: --width 256 --layers 2 --batch-size 8 --length 64
# cuda: --width 2048 --layers 6 --batch-size 128 --length 256 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
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
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class SentenceEncoder(nn.Module):
    def __init__(self, vocabulary, width, layers, heads, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.norm(x).mean(1), dim=-1)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=50, help="batches of sentences")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = SentenceEncoder(args.vocabulary, args.width, args.layers, args.heads, args.length).to(device, dtype).eval()
    if args.compile:
        model = torch.compile(model)
    requests = torch.randint(args.vocabulary, (8, args.batch_size, args.length), device=device)
    index = torch.zeros(8, args.batch_size, args.width, device=device, dtype=dtype)
    for step in range(args.steps):
        index[step % 8] = model(requests[step % 8])
        # step
    print(f"{args.steps * args.batch_size} sentences, the first has {index[0, 0, :3].tolist()}")


if __name__ == "__main__":
    main()
