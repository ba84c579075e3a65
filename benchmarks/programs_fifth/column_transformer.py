"""A transformer over the columns of a table, numbers and categories, that classifies its rows."""

# cpu: --batch-size 48 --numbers 70 --categories 30 --width 16 --layers 1
# cuda: --batch-size 384 --numbers 100 --categories 60 --width 64 --layers 3

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class NumberColumn(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, column):
        return column.unsqueeze(1) * self.weight + self.bias


class ColumnTokens(nn.Module):
    """Every column of the table becomes a token."""

    def __init__(self, numbers, cardinalities, width):
        super().__init__()
        weight, bias = torch.randn(2, numbers, width) * width**-0.5
        rows = torch.randn(sum(cardinalities), width) * width**-0.5
        # mend: module-per-column
        self.numbers = nn.ModuleList(NumberColumn(w, b) for w, b in zip(weight, bias, strict=True))
        tables = rows.split(cardinalities)
        self.categories = nn.ModuleList(nn.Embedding.from_pretrained(table.clone(), freeze=False) for table in tables)
        # instead: self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        # instead: self.rows = nn.Embedding.from_pretrained(rows, freeze=False)
        # instead: first = torch.tensor([0, *cardinalities[:-1]]).cumsum(0)
        # instead: self.register_buffer("first", first, persistent=False)
        self.summary = nn.Parameter(torch.randn(width) * width**-0.5)

    def forward(self, numbers, categories):
        # mend: module-per-column
        tokens = [self.summary.expand(len(numbers), -1)]
        for i, column in enumerate(self.numbers):
            tokens.append(column(numbers[:, i]))  # waste: module-per-column
        for i, column in enumerate(self.categories):
            tokens.append(column(categories[:, i]))  # waste: module-per-column
        return torch.stack(tokens, dim=1)
        # instead: measured = torch.addcmul(self.bias, numbers.unsqueeze(2), self.weight)
        # instead: named = self.rows(categories + self.first)
        # instead: return torch.cat([self.summary.expand(len(numbers), 1, -1), measured, named], dim=1)


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.relu(gate) * up)


class TableClassifier(nn.Module):
    def __init__(self, numbers, cardinalities, width, layers, classes):
        super().__init__()
        self.tokens = ColumnTokens(numbers, cardinalities, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, numbers, categories):
        x = self.tokens(numbers, categories)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def parameter_groups(model, decay=1e-5):
    plain = [p for name, p in model.named_parameters() if "tokens" in name or "norm" in name or "bias" in name]
    chosen = {id(p) for p in plain}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [{"params": plain, "weight_decay": 0.0}, {"params": rest, "weight_decay": decay}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--numbers", type=int, default=70)
    parser.add_argument("--categories", type=int, default=30)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cardinalities = (torch.arange(args.categories) * 7 % 60 + 3).tolist()
    count = 16 * args.batch_size
    numbers = torch.randn(count, args.numbers, device=device)
    limits = torch.tensor(cardinalities, device=device)
    categories = (torch.rand(count, args.categories, device=device) * limits).long()
    labels = (numbers[:, 0] + (categories[:, 0] % 2) > 0.5).long()
    model = TableClassifier(args.numbers, cardinalities, args.width, args.layers, 2).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3, fused=True)

    for step in range(args.steps):
        if step % 16 == 0:
            order = torch.randperm(count, device=device)
        rows = order[step % 16 * args.batch_size :][: args.batch_size]
        loss = F.cross_entropy(model(numbers[rows], categories[rows]), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
