"""Serves text completions: takes waiting prompts in batches, and samples tokens for all of a batch at once."""

# cpu: --width 384 --layers 4 --heads 8 --kv-heads 2 --batch-size 8 --prompt 256 --vocabulary 4000
# cuda: --width 2048 --layers 8 --batch-size 64 --prompt 1024
# block: 64

import argparse
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Request:
    number: int
    prompt: torch.Tensor
    answer: list[int] = field(default_factory=list)


class Attention(nn.Module):
    """Attention in which several heads of queries share one head of keys and values."""

    def __init__(self, args):
        super().__init__()
        self.heads, self.kv_heads = args.heads, args.kv_heads
        self.size = args.width // args.heads
        self.query = nn.Linear(args.width, args.width, bias=False)
        self.key_value = nn.Linear(args.width, 2 * args.kv_heads * self.size, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        shape = args.batch_size, args.kv_heads, args.prompt + args.new_tokens, self.size
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, position):
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.key_value(x).view(batch, length, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        end = position + length
        self.keys[:, :, position:end] = k
        self.values[:, :, position:end] = v
        k, v = self.keys[:, :, :end], self.values[:, :, :end]
        # mend: heads-repeated-in-memory
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)  # waste: heads-repeated-in-memory
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)  # waste: heads-repeated-in-memory
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        # instead: y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.attention = Attention(args)
        self.up, self.down = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

    def forward(self, x, position):
        x = x + self.attention(self.norm1(x), position)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.prompt + args.new_tokens, args.width)
        self.blocks = nn.ModuleList([Block(args) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, ids, position):
        x = self.tokens(ids) + self.positions.weight[position : position + ids.shape[1]]
        for block in self.blocks:
            x = block(x, position)
        return self.head(self.norm(x[:, -1]))


class Server:
    def __init__(self, model, args, device):
        self.model, self.args, self.device = model, args, device
        self.waiting = deque()
        self.arrived = self.answered = 0

    def arrive(self, count):
        """New requests; long prompts have been cut to their last tokens."""
        for _ in range(count):
            prompt = torch.randint(self.args.vocabulary, (self.args.prompt,))
            self.waiting.append(Request(self.arrived, prompt))
            self.arrived += 1

    def sample(self, logits):
        """Draws from the softmax: the largest of the probabilities over exponential noise."""
        probabilities = torch.softmax(logits / self.args.temperature, dim=-1, dtype=torch.float32)
        noise = torch.empty_like(probabilities).exponential_()
        return (probabilities / noise).argmax(-1, keepdim=True)

    @torch.inference_mode()
    def serve_batch(self):
        requests = [self.waiting.popleft() for _ in range(self.args.batch_size)]
        ids = torch.stack([request.prompt for request in requests]).to(self.device)
        position, drawn = 0, []
        for _ in range(self.args.new_tokens):
            logits = self.model(ids, position)
            position += ids.shape[1]
            ids = self.sample(logits)
            drawn.append(ids)
            # step
        for request, answer in zip(requests, torch.cat(drawn, dim=1).tolist(), strict=True):
            request.answer = answer
        self.answered += len(requests)
        return requests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=4, help="batches of prompts")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    server = Server(Decoder(args).to(device, dtype).eval(), args, device)
    for _ in range(args.steps):
        server.arrive(args.batch_size)
        requests = server.serve_batch()
        print(f"{server.answered} answered, request {requests[0].number} begins with {requests[0].answer[:4]}")


if __name__ == "__main__":
    main()
