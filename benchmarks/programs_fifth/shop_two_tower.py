"""Train a two-tower recommender for a shop: large tables with Adagrad, towers with Adam, negatives from the batch."""

# cpu: --users 60000 --items 60000 --width 32 --batch-size 256 --clicks 10
# cuda: --users 4000000 --items 4000000 --width 64 --batch-size 8192 --clicks 20

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Batch:
    users: torch.Tensor
    clicked: torch.Tensor
    bought: torch.Tensor
    frequency: torch.Tensor


def tower(inputs, width):
    return nn.Sequential(nn.Linear(inputs, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class TwoTower(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        # mend: dense-gradients-of-tables
        self.user_table = nn.Embedding(users, width)  # waste: dense-gradients-of-tables
        self.item_table = nn.Embedding(items, width)  # waste: dense-gradients-of-tables
        # instead: self.user_table = nn.Embedding(users, width, sparse=True)
        # instead: self.item_table = nn.Embedding(items, width, sparse=True)
        for table in (self.user_table, self.item_table):
            nn.init.normal_(table.weight, std=0.05)
        self.user_tower = tower(2 * width, width)
        self.item_tower = tower(width, width)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def tables(self):
        return [self.user_table.weight, self.item_table.weight]

    def forward(self, batch):
        history = self.item_table(batch.clicked).mean(dim=1)
        user = self.user_tower(torch.cat([self.user_table(batch.users), history], dim=1))
        item = self.item_tower(self.item_table(batch.bought))
        return F.normalize(user, dim=1), F.normalize(item, dim=1)


def sampled_softmax(user, item, scale, batch):
    """Cross-entropy with the items of the others as negatives, corrected by how common they are."""
    logits = scale.exp() * (user @ item.T) - batch.frequency.log()
    return F.cross_entropy(logits, torch.arange(len(user), device=user.device))


class Log:
    """Draws purchases with a long tail of items."""

    def __init__(self, users, items, clicks, device):
        self.users, self.items, self.clicks, self.device = users, items, clicks, device

    def popular(self, *shape):
        rank = torch.rand(shape, device=self.device).pow(2) * self.items
        return rank.long().clamp(max=self.items - 1)

    def draw(self, count):
        users = torch.randint(0, self.users, (count,), device=self.device)
        bought = self.popular(count)
        near = bought[:, None] + torch.randint(-20, 21, (count, self.clicks), device=self.device)
        odd = torch.rand(count, self.clicks, device=self.device) < 0.3
        clicked = torch.where(odd, self.popular(count, self.clicks), near.clamp(0, self.items - 1))
        frequency = 0.5 * (self.items * (bought + 1.0)).rsqrt()
        return Batch(users, clicked, bought, frequency)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--users", type=int, default=60000)
    parser.add_argument("--items", type=int, default=60000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--clicks", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = TwoTower(args.users, args.items, args.width)
    table_ids = {id(p) for p in model.tables()}
    rest = [p for p in model.parameters() if id(p) not in table_ids]
    optimizers = [torch.optim.Adagrad(model.tables(), lr=0.05), torch.optim.Adam(rest, lr=1e-3, fused=True)]
    log = Log(args.users, args.items, args.clicks, device)
    running = torch.zeros((), device=device)

    for step in range(args.steps):
        batch = log.draw(args.batch_size)
        user, item = model(batch)
        loss = sampled_softmax(user, item, model.scale, batch)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()  # waste: dense-gradients-of-tables
            # instead: optimizer.step()
        running += loss.detach()
        if step % 10 == 9 or step == args.steps - 1:
            print(f"step {step}: mean loss {running.item() / (step % 10 + 1):.4f}")
            running.zero_()
        # step


if __name__ == "__main__":
    main()
