"""Pretrains a switch-style language model whose feed-forward layers route each token to one of several experts."""

# cpu: --width 128 --layers 2 --heads 4 --experts 8 --vocab 1000 --batch-size 4 --seq-len 192
# cuda: --width 1024 --layers 6 --heads 16 --experts 16 --vocab 16000 --batch-size 16 --seq-len 512

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ExpertBank(nn.Module):
    def __init__(self, experts, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x):
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class SwitchLayer(nn.Module):
    def __init__(self, width, experts, capacity_factor=1.25):
        super().__init__()
        self.count = experts
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = ExpertBank(experts, width, 4 * width)

    def forward(self, inputs):
        x = inputs.flatten(0, 1)
        tokens, width = x.shape
        capacity = math.ceil(self.capacity_factor * tokens / self.count)
        probs = self.router(x).float().softmax(-1)
        gate, choice = probs.max(-1)
        assigned = F.one_hot(choice, self.count)
        place = (assigned.cumsum(0) * assigned).sum(-1) - 1
        kept = place < capacity

        # mend: mask-dispatch
        seats = F.one_hot(place.clamp(max=capacity - 1), capacity) * kept.unsqueeze(-1)
        dispatch = (assigned.unsqueeze(-1) * seats.unsqueeze(1)).to(x.dtype)
        buffers = torch.einsum("tec,td->ecd", dispatch, x)  # waste: mask-dispatch
        results = self.experts(buffers)
        combine = dispatch * gate.to(x.dtype).view(-1, 1, 1)
        out = torch.einsum("tec,ecd->td", combine, results.to(x.dtype))  # waste: mask-dispatch
        # instead: seat = torch.where(kept, choice * capacity + place, self.count * capacity)
        # instead: buffers = x.new_zeros(self.count * capacity + 1, width).index_copy(0, seat, x)
        # instead: results = self.experts(buffers[:-1].view(self.count, capacity, width)).flatten(0, 1).to(x.dtype)
        # instead: out = torch.cat([results, results.new_zeros(1, width)])[seat] * gate.to(x.dtype).unsqueeze(-1)

        balance = self.count * (assigned.float().mean(0) * probs.mean(0)).sum()
        return out.view_as(inputs), balance


class Block(nn.Module):
    def __init__(self, width, heads, experts):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.switch = SwitchLayer(width, experts)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        update, balance = self.switch(self.norm2(x))
        return x + update, balance


class SwitchLM(nn.Module):
    def __init__(self, vocab, width, layers, heads, experts, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList([Block(width, heads, experts) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        total = 0.0
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return self.head(self.norm(x)), total / len(self.blocks)


def make_text(rows, length, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, vocab + 1).float().reciprocal()
    words = torch.multinomial(weights, rows * length, True, generator=generator).view(rows, length)
    return torch.where(torch.arange(length) % 3 == 0, words, words.roll(1, 1).mul(7).add(3) % vocab)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=192)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = SwitchLM(args.vocab, args.width, args.layers, args.heads, args.experts, args.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    text = make_text(args.batch_size * 8, args.seq_len + 1, args.vocab, seed=4).to(device)

    for step in range(args.steps):
        start = (step % 8) * args.batch_size
        batch = text[start : start + args.batch_size]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits, balance = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f} balance {balance.item():.4f}")
        # step


if __name__ == "__main__":
    main()
