"""Trains a transformer over columns of loan applications: each column is a token, and one more asks for the risk."""

# cpu: --numbers 40 --codes 8 --width 64 --heads 4 --layers 2 --batch-size 64 --rows 20000
# cuda: --numbers 128 --codes 16 --width 512 --heads 8 --layers 4 --batch-size 128 --rows 200000

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class NumberTokens(nn.Module):
    """A token for each column of numbers: the number times a vector of the column, and one added."""

    def __init__(self, columns, width):
        super().__init__()
        # mend: tokens-column-by-column
        self.columns = nn.ModuleList([nn.Linear(1, width) for _ in range(columns)])
        # instead: self.weight = nn.Parameter(torch.rand(columns, width) * 2 - 1)
        # instead: self.bias = nn.Parameter(torch.rand(columns, width) * 2 - 1)

    def forward(self, numbers):
        # mend: tokens-column-by-column
        tokens = []
        for i, column in enumerate(self.columns):
            tokens.append(column(numbers[:, i : i + 1]))  # waste: tokens-column-by-column
        return torch.stack(tokens, dim=1)
        # instead: return torch.addcmul(self.bias, numbers.unsqueeze(-1), self.weight)


class CodeTokens(nn.Module):
    """A token for each column of codes, from one table for all columns."""

    def __init__(self, columns, values, width):
        super().__init__()
        self.table = nn.Embedding(columns * values, width)
        self.register_buffer("offsets", torch.arange(columns) * values)

    def forward(self, codes):
        return self.table(codes + self.offsets)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class RiskModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.numbers = NumberTokens(args.numbers, args.width)
        self.codes = CodeTokens(args.codes, args.values, args.width)
        self.question = nn.Parameter(0.02 * torch.randn(1, 1, args.width))
        self.layers = nn.ModuleList([Layer(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.out = nn.Linear(args.width, 1)

    def forward(self, numbers, codes):
        question = self.question.expand(len(numbers), -1, -1)
        x = torch.cat([question, self.numbers(numbers), self.codes(codes)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x[:, 0]))[:, 0]


class Applications:
    """Made-up applications on the device; about one loan in five is not paid back."""

    def __init__(self, args, device, dtype):
        generator = torch.Generator().manual_seed(4)
        numbers = torch.randn(args.rows, args.numbers, generator=generator)
        codes = torch.randint(args.values, (args.rows, args.codes), generator=generator)
        risk = numbers[:, 0] - numbers[:, 1] + (codes[:, 0] < args.values // 4)
        self.numbers, self.codes = numbers.to(device, dtype), codes.to(device)
        self.unpaid = (risk > 1.5).to(device, dtype)

    def batch(self, size):
        rows = torch.randint(len(self.unpaid), (size,), device=self.unpaid.device)
        return self.numbers[rows], self.codes[rows], self.unpaid[rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=int, default=128, help="columns of numbers")
    parser.add_argument("--codes", type=int, default=16, help="columns of codes")
    parser.add_argument("--values", type=int, default=100, help="values of a code")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    applications = Applications(args, device, dtype)
    model = RiskModel(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    average = torch.zeros((), device=device)
    for step in range(args.steps):
        numbers, codes, unpaid = applications.batch(args.batch_size)
        loss = F.binary_cross_entropy_with_logits(model(numbers, codes), unpaid)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach().float(), 0.05)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {average.item():.4f}")
        # step


if __name__ == "__main__":
    main()
