"""Train a Switch decoder: every other feed-forward block sends a token to one of several experts of limited room."""

# cpu: --width 64 --layers 2 --batch-size 4 --context 128 --experts 4 --vocab 256
# cuda: --width 1024 --layers 4 --batch-size 16 --context 512 --experts 16 --vocab 8192

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class SwitchFeedForward(nn.Module):
    """Top-one routing; what does not fit into an expert's room passes by on the residual path."""

    def __init__(self, width, experts, room=1.25):
        super().__init__()
        self.experts, self.room = experts, room
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / math.sqrt(4 * width))

    def forward(self, x):
        tokens = x.reshape(-1, x.size(-1))
        count = tokens.size(0)
        room = math.ceil(self.room * count / self.experts)
        odds = self.router(tokens).float().softmax(dim=-1)
        gate, expert = odds.max(dim=-1)
        chosen = F.one_hot(expert, self.experts)
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=-1) - 1
        fits = place < room
        balance = self.experts * (odds.mean(dim=0) * chosen.float().mean(dim=0)).sum()

        # mend: dispatch-by-einsum
        seat = F.one_hot(place.clamp(max=room - 1), room) * fits[:, None]
        dispatch = (chosen[:, :, None] * seat[:, None, :]).to(tokens.dtype)  # waste: dispatch-by-einsum
        received = torch.einsum("nec,nd->ecd", dispatch, tokens)  # waste: dispatch-by-einsum
        # instead: slot = torch.where(fits, expert * room + place, self.experts * room)
        # instead: held = tokens.new_zeros(self.experts * room + 1, tokens.size(1)).index_copy(0, slot, tokens)
        # instead: received = held[:-1].view(self.experts, room, -1)

        answers = torch.bmm(F.gelu(torch.bmm(received, self.up), approximate="tanh"), self.down)

        # mend: dispatch-by-einsum
        combine = dispatch * gate[:, None, None]  # waste: dispatch-by-einsum
        result = torch.einsum("nec,ecd->nd", combine.to(answers.dtype), answers)  # waste: dispatch-by-einsum
        # instead: flat = answers.flatten(0, 1)
        # instead: answer = flat.index_select(0, slot.clamp(max=len(flat) - 1))
        # instead: result = answer * (gate * fits).to(answers.dtype)[:, None]
        return result.view_as(x), balance


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh")), None


class Layer(nn.Module):
    def __init__(self, width, feed_forward, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed_forward = feed_forward

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        change, balance = self.feed_forward(self.norm2(x))
        return x + change, balance


class SwitchDecoder(nn.Module):
    def __init__(self, vocab, width, layers, context, experts):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        kinds = [SwitchFeedForward(width, experts) if i % 2 else FeedForward(width) for i in range(layers)]
        self.layers = nn.ModuleList(Layer(width, kind) for kind in kinds)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position[: tokens.size(1)]
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            if balance is not None:
                balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SwitchDecoder(args.vocab, args.width, args.layers, args.context, args.experts).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    text = torch.randint(0, args.vocab, (64, 1), device=device) + torch.arange(args.context + 1, device=device).square()
    text = text % args.vocab

    for step in range(args.steps):
        window = text[torch.randint(0, len(text), (args.batch_size,), device=device)]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits, balance = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} balance {balance.item():.4f}")
        # step


if __name__ == "__main__":
    main()
