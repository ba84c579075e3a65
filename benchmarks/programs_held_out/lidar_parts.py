"""Segments point clouds of a laser scanner into parts: every layer has a graph of nearest points of its own."""

# cpu: --points 256 --neighbours 8 --width 16 --hidden 128 --batch-size 2
# cuda: --points 2048 --neighbours 20 --width 64 --hidden 1024 --batch-size 8

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

PARTS = 8


@torch.no_grad()
def nearest(features, neighbours):
    """Indices (batch, points, neighbours) of the nearest points, which may be far away in space."""
    distances = torch.cdist(features, features)
    order = distances.argsort(dim=-1)  # waste: all-distances-sorted
    # instead: order = distances.topk(neighbours, largest=False).indices
    return order[..., :neighbours]


def pick(features, index):
    """The features of all neighbours: (batch, points, neighbours, channels)."""
    batch, points, channels = features.shape
    # mend: gathered-from-expanded
    table = features[:, None].expand(batch, points, points, channels)
    return table.gather(2, index[..., None].expand(-1, -1, -1, channels))  # waste: gathered-from-expanded
    # instead: first = torch.arange(batch, device=index.device) * points
    # instead: rows = (index + first[:, None, None]).flatten()
    # instead: return features.flatten(0, 1).index_select(0, rows).view(*index.shape, channels)


class EdgeConv(nn.Module):
    """A perceptron of every edge, and the maximum over the edges of a point."""

    def __init__(self, inputs, outputs, neighbours):
        super().__init__()
        self.neighbours = neighbours
        self.there = nn.Linear(inputs, outputs, bias=False)
        self.here = nn.Linear(inputs, outputs)
        self.mix = nn.Linear(outputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x):
        index = nearest(x, self.neighbours)
        edges = pick(self.there(x), index) + self.here(x)[:, :, None]
        edges = self.mix(F.gelu(edges))
        return self.norm(edges.amax(dim=2))


class PartNet(nn.Module):
    def __init__(self, width, hidden, neighbours):
        super().__init__()
        sizes = [3, width, width, 2 * width]
        self.layers = nn.ModuleList([EdgeConv(a, b, neighbours) for a, b in zip(sizes[:-1], sizes[1:], strict=True)])
        self.whole = nn.Linear(4 * width, hidden)
        self.head = nn.Sequential(nn.Linear(4 * width + hidden, hidden), nn.GELU(), nn.Linear(hidden, PARTS))

    def forward(self, points):
        x, outputs = points, []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        x = torch.cat(outputs, dim=2)
        cloud = self.whole(x).amax(dim=1, keepdim=True).expand(-1, x.shape[1], -1)
        return self.head(torch.cat([x, cloud.to(x.dtype)], dim=2))


def make_clouds(count, points, device):
    """Rings and walls that are stretched at random; the part is the octant of a point."""
    angle = torch.rand(count, points, device=device) * 2 * math.pi
    height = torch.rand(count, points, device=device) * 2 - 1
    radius = 1 + 0.2 * torch.randn(count, points, device=device)
    clouds = torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=2)
    x, y, z = (clouds > 0).long().unbind(2)
    return clouds * (0.5 + torch.rand(count, 1, 3, device=device)), x + 2 * y + 4 * z


def turn(clouds):
    """Turns every cloud about the vertical axis."""
    angle = torch.rand(len(clouds), device=clouds.device) * 2 * math.pi
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = [cos, -sin, zero, sin, cos, zero, zero, zero, zero + 1]
    return clouds @ torch.stack(rows, dim=1).view(-1, 3, 3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=2048)
    parser.add_argument("--neighbours", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--clouds", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = PartNet(args.width, args.hidden, args.neighbours).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    clouds, parts = make_clouds(args.clouds, args.points, device)
    for step in range(args.steps):
        rows = torch.randint(args.clouds, (args.batch_size,), device=device)
        points = turn(clouds[rows])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(points)
        loss = F.cross_entropy(scores.float().flatten(0, 1), parts[rows].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
