"""Trains a decoder on pairs of answers of which people preferred one (direct preference optimization)."""

# cpu: --width 64 --layers 2 --heads 4 --pairs 4 --limit 96 --vocabulary 1000
# cuda: --width 1024 --layers 8 --pairs 8 --limit 768 --vocabulary 8000

import argparse
import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.limit, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Preferences:
    """Prompts with a chosen and a rejected answer; no conversation is longer than 5/12 of the limit."""

    def __init__(self, args, count=400, seed=0):
        self.limit = args.limit
        self.chance = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        longest = args.limit * 5 // 12
        self.pairs = []
        for _ in range(count):
            prompt = torch.randint(1, args.vocabulary, (longest // 4,), generator=generator)
            lengths = [self.chance.randint(longest // 4, longest * 3 // 4) for _ in range(2)]
            answers = [torch.randint(1, args.vocabulary, (n,), generator=generator) for n in lengths]
            self.pairs.append((len(prompt), *(torch.cat([prompt, answer]) for answer in answers)))

    def batch(self, size):
        """Token ids, the chosen answers first, and which of them belong to an answer."""
        pairs = self.chance.sample(self.pairs, size)
        rows = [pair[1] for pair in pairs] + [pair[2] for pair in pairs]
        length = self.limit  # waste: padded-to-the-limit
        # instead: length = min(self.limit, -(-max(len(row) for row in rows) // 32) * 32)
        ids = torch.full((2 * size, length), PAD)
        in_answer = torch.zeros(2 * size, length, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            in_answer[number, pairs[number % size][0] : len(row)] = True
        return ids, in_answer


def answer_log_probability(model, ids, in_answer):
    """The log-probability of every answer, summed over its tokens."""
    logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return -(losses.view(len(ids), -1).float() * in_answer[:, 1:]).sum(1)


def preference_loss(policy, reference, ids, in_answer, beta):
    """The loss, and how much better than the rejected answers the policy likes the chosen ones."""
    ours = answer_log_probability(policy, ids, in_answer)
    theirs = answer_log_probability(reference, ids, in_answer)  # waste: gradients-of-the-reference
    # instead: with torch.no_grad():
    # instead:     theirs = answer_log_probability(reference, ids, in_answer)
    chosen, rejected = (beta * (ours - theirs)).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean(), (chosen - rejected).detach().mean()


def to_device(tensor, device):
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--limit", type=int, default=768, help="tokens of the longest conversation that is allowed")
    parser.add_argument("--pairs", type=int, default=8, help="per batch")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = Decoder(args).to(device, dtype)
    reference = copy.deepcopy(policy).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    preferences = Preferences(args)

    for step in range(args.steps):
        ids, in_answer = (to_device(tensor, device) for tensor in preferences.batch(args.pairs))
        loss, margin = preference_loss(policy, reference, ids, in_answer, args.beta)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, margin {margin.item():.4f}")
        # step


if __name__ == "__main__":
    main()
