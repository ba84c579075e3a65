"""Trains a small language model whose feed-forward layers are mixtures of experts."""

# cpu: --width 128 --hidden 128 --experts 32 --layers 2 --batch-size 4 --length 64 --vocabulary 2000
# cuda: --width 512 --hidden 512 --experts 64 --layers 4 --batch-size 8 --length 512 --vocabulary 32000

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MixtureOfExperts(nn.Module):
    def __init__(self, width, hidden, experts, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        # mend: experts-in-a-loop
        self.experts = nn.ModuleList([Expert(width, hidden) for _ in range(experts)])
        # instead: self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        # instead: self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, choice = self.router(tokens).softmax(-1).topk(self.chosen, dim=-1)
        # mend: experts-in-a-loop
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(choice == number)  # waste: experts-in-a-loop
            if len(rows) == 0:
                continue
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slot, None])  # waste: experts-in-a-loop
        # instead: experts, width = self.router.weight.shape
        # instead: room = int(1.25 * choice.numel() / experts) + 1
        # instead: flat = choice.flatten()
        # instead: place = F.one_hot(flat, experts).cumsum(0).gather(1, flat[:, None])[:, 0] - 1
        # instead: index = torch.where(place < room, flat * room + place, experts * room)
        # instead: sent = tokens.new_zeros(experts * room + 1, width)
        # instead: sent = sent.index_copy(0, index, tokens.repeat_interleave(self.chosen, 0))
        # instead: hidden = F.silu(torch.bmm(sent[:-1].view(experts, room, width), self.up))
        # instead: made = torch.bmm(hidden, self.down).flatten(0, 1)
        # instead: made = torch.cat([made, made.new_zeros(1, width)])[index].view(-1, self.chosen, width)
        # instead: out = (made * weights[..., None]).sum(1)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads = args.heads
        self.norm1 = nn.LayerNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.norm2 = nn.LayerNorm(args.width)
        self.moe = MixtureOfExperts(args.width, args.hidden, args.experts)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.moe(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList([Block(args) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    model = LanguageModel(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    corpus = torch.randint(args.vocabulary, (1_000_000,), device=device)

    for step in range(args.steps):
        starts = torch.randint(len(corpus) - args.length - 1, (args.batch_size, 1), device=device)
        window = corpus[starts + torch.arange(args.length + 1, device=device)]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
