"""Trains a small chat model on preference pairs with direct preference optimisation against a frozen reference."""

# cpu: --width 128 --layers 3 --heads 4 --vocab 1000 --batch-size 4 --max-length 160
# cuda: --width 1024 --layers 8 --heads 16 --vocab 16000 --batch-size 8 --max-length 1024

import argparse
import copy
import random

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class ChatModel(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_length):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(max_length, width))
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


def make_pairs(count, vocab, max_length, seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(count):
        prompt = torch.randint(3, vocab, (rng.randint(max_length // 10, max_length // 5),), generator=generator)
        chosen = torch.randint(3, vocab // 2, (rng.randint(max_length // 10, max_length // 3),), generator=generator)
        rejected = torch.randint(
            vocab // 2, vocab, (rng.randint(max_length // 10, max_length // 3),), generator=generator
        )
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs


def collate(batch, max_length, device):
    rows = [torch.cat([pair["prompt"], pair[side]]) for side in ("chosen", "rejected") for pair in batch]
    prompts = [pair["prompt"].numel() for pair in batch] * 2
    width = max_length  # waste: pad-to-limit
    # instead: width = max(row.numel() for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=False)):
        tokens[i, : row.numel()] = row
        mask[i, prompt : row.numel()] = 1.0
    return tokens.to(device), mask.to(device)


def sequence_logps(model, tokens, mask):
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1])
    nll = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return -(nll.view(tokens.size(0), -1) * mask[:, 1:]).sum(-1)


@torch.no_grad()
def score_reference(reference, tokens, mask):
    return sequence_logps(reference, tokens, mask)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=160)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = ChatModel(args.vocab, args.width, args.layers, args.heads, args.max_length).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, fused=True)

    pairs = make_pairs(args.pairs, args.vocab, args.max_length, seed=2)
    batches = [pairs[i : i + args.batch_size] for i in range(0, args.pairs, args.batch_size)]
    # mend: reference-again
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    # instead: reference = copy.deepcopy(policy).eval().requires_grad_(False)
    # instead: saved = [score_reference(reference, *collate(b, args.max_length, device)) for b in batches]

    for step in range(args.steps):
        index = step % len(batches)
        tokens, mask = collate(batches[index], args.max_length, device)
        ref_logps = score_reference(reference, tokens, mask)  # waste: reference-again
        # instead: ref_logps = saved[index]
        logps = sequence_logps(policy, tokens, mask)

        chosen, rejected = (logps - ref_logps).chunk(2)
        margin = args.beta * (chosen - rejected)
        loss = -F.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            accuracy = (margin > 0).float().mean().item()
            print(f"step {step} loss {loss.item():.5f} accuracy {accuracy:.2f}")
        # step


if __name__ == "__main__":
    main()
