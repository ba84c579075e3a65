"""Answers requests for embeddings of passages; a queue of them is served in batches."""

# cpu: --width 128 --layers 2 --batch-size 8 --longest 256
# cuda: --width 1024 --layers 12 --batch-size 64 --longest 512
# block: 8

import argparse
import random
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Request(NamedTuple):
    number: int
    tokens: torch.Tensor


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PassageEncoder(nn.Module):
    """One vector of length 1 for each passage. Token 0 fills up."""

    def __init__(self, vocabulary, longest, width, layers, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(longest, width) * 0.02)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        real = tokens != 0
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        mask = real[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x) * real[..., None]
        return F.normalize(x.sum(1, dtype=torch.float32), dim=-1)


def made_up_requests(count, vocabulary, longest):
    """Passages as people send them: many short ones and some long ones."""
    lengths = [min(longest, max(8, int(random.lognormvariate(0, 0.7) * longest / 4))) for _ in range(count)]
    return [Request(number, torch.randint(1, vocabulary, (length,))) for number, length in enumerate(lengths)]


def batches(queue, batch_size, device):
    """The requests of a queue, batch by batch: their numbers, and their tokens on the device."""
    # mend: batches-in-order-of-arrival
    # instead: queue = sorted(queue, key=lambda request: len(request.tokens))
    for first in range(0, len(queue), batch_size):
        taken = queue[first : first + batch_size]
        passages = [request.tokens for request in taken]
        tokens = pad_sequence(passages, batch_first=True)  # waste: batches-in-order-of-arrival
        tokens = F.pad(tokens, (0, -tokens.shape[1] % 16))
        if device.type == "cuda":
            tokens = tokens.pin_memory()
        yield [request.number for request in taken], tokens.to(device, non_blocking=True)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--queue", type=int, default=8, help="batches that wait at a time")
    parser.add_argument("--steps", type=int, default=80, help="batches that are served")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = PassageEncoder(args.vocabulary, args.longest, args.width, args.layers, args.heads).to(dtype).eval()
    queue = made_up_requests(args.queue * args.batch_size, args.vocabulary, args.longest)
    answers = {}
    step, started = 0, time.perf_counter()
    while step < args.steps:
        random.shuffle(queue)
        for numbers, tokens in batches(queue, args.batch_size, device):
            embeddings = model(tokens)  # waste: batches-in-order-of-arrival
            answers.update(zip(numbers, embeddings.cpu(), strict=True))
            step += 1
            # step
    seconds = time.perf_counter() - started
    print(f"{step * args.batch_size / seconds:.0f} passages a second; the first begins {answers[0][:3].tolist()}")


if __name__ == "__main__":
    main()
