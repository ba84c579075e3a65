"""Generate with a decoder for a large batch: a cache allocated once, top-k sampling without leaving the device."""

# cpu: --width 256 --layers 3 --batch-size 32 --prompt 512 --max-length 576 --vocab 1000
# cuda: --width 4096 --layers 12 --batch-size 256 --prompt 3000 --max-length 3072 --vocab 32000

import argparse

import torch
import torch.nn.functional as F
from torch import nn

END = 0


class Attention(nn.Module):
    """Queries of the heads that share a key are seen as rows of one small matrix: nothing is repeated."""

    def __init__(self, width, kv_heads, groups, batch, length):
        super().__init__()
        self.kv_heads, self.groups = kv_heads, groups
        self.head_width = width // (kv_heads * groups)
        self.qkv = nn.Linear(width, width + 2 * kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        shape = (batch, kv_heads, length, self.head_width)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, position):
        batch, width = x.shape
        kv_width = self.kv_heads * self.head_width
        q, k, v = self.qkv(x).split([width, kv_width, kv_width], dim=-1)
        self.keys[:, :, position] = k.view(batch, self.kv_heads, self.head_width)
        self.values[:, :, position] = v.view(batch, self.kv_heads, self.head_width)
        q = q.view(batch, self.kv_heads, self.groups, self.head_width)
        mixed = F.scaled_dot_product_attention(q, self.keys[:, :, : position + 1], self.values[:, :, : position + 1])
        return self.out(mixed.reshape(batch, width))


class Layer(nn.Module):
    def __init__(self, width, kv_heads, groups, batch, length):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, kv_heads, groups, batch, length)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, position):
        x = x + self.attention(self.norm1(x), position)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Generator(nn.Module):
    def __init__(self, vocab, width, layers, batch, length, kv_heads=4, groups=4):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, kv_heads, groups, batch, length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def pretend_prompt(self, length):
        for layer in self.layers:
            layer.attention.keys[:, :, :length].normal_()
            layer.attention.values[:, :, :length].normal_()

    def forward(self, tokens, position):
        x = self.token(tokens) + self.position.weight[position]
        for layer in self.layers:
            x = layer(x, position)
        return self.head(self.norm(x))


def sample(logits, k, temperature):
    """Gumbel noise on the k best makes the draw without leaving the device."""
    best, names = logits.topk(k, dim=-1)
    noise = -torch.empty_like(best, dtype=torch.float32).exponential_().log_()
    winner = torch.add(noise, best, alpha=1 / temperature).argmax(dim=-1, keepdim=True)
    return names.gather(1, winner).squeeze(1)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--max-length", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Generator(args.vocab, args.width, args.layers, args.batch_size, args.max_length).eval()
        tokens = torch.randint(1, args.vocab, (args.batch_size,))
        written = torch.full((args.batch_size, args.steps), END)
        finished = torch.zeros(args.batch_size, dtype=torch.bool)
    model.pretend_prompt(args.prompt)
    room = args.max_length - args.prompt

    for step in range(args.steps):
        logits = model(tokens, args.prompt + step % room)
        tokens = sample(logits, args.top_k, temperature=0.8).masked_fill_(finished, END)
        written[:, step] = tokens
        finished |= tokens == END
        if step % 20 == 19:
            done = finished.sum().item()
            print(f"{step + 1} tokens: {done} of {args.batch_size} have ended, checksum {written.sum().item()}")
            if done == args.batch_size:
                break
        # step


if __name__ == "__main__":
    main()
