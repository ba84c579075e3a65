"""Forecasts the sensors of a plant with a transformer whose feed-forward layers are mixtures of experts."""

# cpu: --width 96 --hidden 192 --layers 2 --experts 4 --batch-size 4 --length 64
# cuda: --width 1024 --hidden 4096 --layers 3 --experts 8 --batch-size 32 --length 256

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Each token goes to two experts, where they have room for it."""

    def __init__(self, width, hidden, experts, room):
        super().__init__()
        self.experts, self.room = experts, room
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x):
        tokens = x.shape[0]
        capacity = int(self.room * 2 * tokens / self.experts)
        scores = self.router(x).float().softmax(-1)
        gates, chosen = scores.topk(2, dim=-1)
        gates = (gates / gates.sum(-1, keepdim=True)).t()
        marks = F.one_hot(chosen.t(), self.experts)
        balance = self.experts * (marks[0].float().mean(0) * scores.mean(0)).sum()

        # The place of each token in the queue of its expert; first choices go first.
        queue = marks.flatten(0, 1).cumsum(0).view_as(marks)
        place = (queue * marks).sum(-1) - 1
        gates = gates * (place < capacity)

        # mend: tokens-moved-by-products
        places = F.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype)
        weighted = (gates[..., None] * marks).to(x.dtype)
        combine = torch.einsum("kse,ksc->sec", weighted, places)  # waste: tokens-moved-by-products
        inputs = torch.einsum("sec,sm->ecm", (combine > 0).to(x.dtype), x)  # waste: tokens-moved-by-products
        # instead: slots = (chosen.t() * capacity + place).flatten()
        # instead: slots = torch.where((place < capacity).flatten(), slots, self.experts * capacity)
        # instead: rows = x.new_zeros(self.experts * capacity + 1, x.shape[1]).index_copy(0, slots, torch.cat([x, x]))
        # instead: inputs = rows[:-1].view(self.experts, capacity, -1)
        outputs = torch.bmm(F.gelu(torch.bmm(inputs, self.up), approximate="tanh"), self.down)
        # mend: tokens-moved-by-products
        y = torch.einsum("sec,ecm->sm", combine, outputs)  # waste: tokens-moved-by-products
        # instead: found = outputs.flatten(0, 1).index_select(0, slots.clamp(max=self.experts * capacity - 1))
        # instead: y = (found.view(2, tokens, -1) * gates.to(x.dtype)[..., None]).sum(0)
        return y, balance


class Layer(nn.Module):
    def __init__(self, width, hidden, heads, experts, room):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mixture = Mixture(width, hidden, experts, room)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y, balance = self.mixture(self.norm2(x).flatten(0, 1))
        return x + y.view_as(x), balance


class Forecaster(nn.Module):
    def __init__(self, sensors, width, hidden, layers, heads, experts, room, length):
        super().__init__()
        self.sensors = nn.Linear(sensors, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList([Layer(width, hidden, heads, experts, room) for _ in range(layers)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, sensors)

    def forward(self, readings):
        x = self.sensors(readings) + self.places
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.out(self.norm(x)), torch.stack(balances).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sensors", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--room", type=float, default=1.25)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = Forecaster(
            args.sensors, args.width, args.hidden, args.layers, args.heads, args.experts, args.room, args.length
        ).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    clock = torch.arange(65536, device=device)[:, None] * torch.rand(args.sensors, device=device) * 0.2
    history = (clock.sin() + 0.1 * torch.randn(len(clock), args.sensors, device=device)).to(dtype)
    window = torch.arange(args.length + 1, device=device)
    for step in range(args.steps):
        starts = torch.randint(len(history) - args.length - 1, (args.batch_size, 1), device=device)
        readings = history[starts + window]
        forecast, balance = model(readings[:, :-1])
        loss = F.mse_loss(forecast.float(), readings[:, 1:].float())
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, balance {balance.item():.3f}")
        # step


if __name__ == "__main__":
    main()
