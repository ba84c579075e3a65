"""Trains a multi-hop graph network for node classification on a fixed graph, full batch."""

# cpu: --nodes 8000 --degree 16 --features 64 --hidden 48
# cuda: --nodes 170000 --degree 14 --features 128 --hidden 256

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def make_graph(nodes, degree, num_classes, features, generator):
    """A random graph whose edges prefer nodes of the same class, and noisy features."""
    labels = torch.randint(num_classes, (nodes,), generator=generator)
    order = labels.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(nodes)
    source = torch.arange(nodes).repeat_interleave(degree // 2)
    offset = torch.randint(-nodes // (2 * num_classes), nodes // (2 * num_classes), source.shape, generator=generator)
    near = order[(rank[source] + offset) % nodes]
    far = torch.randint(nodes, source.shape, generator=generator)
    target = torch.where(torch.rand(source.shape, generator=generator) < 0.7, near, far)
    centers = torch.randn(num_classes, features, generator=generator)
    x = centers[labels] + 3.0 * torch.randn(nodes, features, generator=generator)
    return torch.stack([source, target]), x, labels


def normalized_adjacency(edges, nodes):
    """D^-1/2 (A + I) D^-1/2 as a CSR matrix, with every edge in both directions."""
    loops = torch.arange(nodes).repeat(2, 1)
    both = torch.cat([edges, edges.flip(0), loops], dim=1)
    adjacency = torch.sparse_coo_tensor(both, torch.ones(both.shape[1]), (nodes, nodes)).coalesce()
    row, col = adjacency.indices()
    weight = adjacency.values().clamp(max=1.0)
    degree = torch.zeros(nodes).index_add_(0, row, weight)
    scale = degree.rsqrt()
    values = scale[row] * weight * scale[col]
    return torch.sparse_coo_tensor(torch.stack([row, col]), values, (nodes, nodes)).to_sparse_csr()


class HopEncoder(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.linear = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x):
        return F.relu(self.norm(self.linear(x)))


class MultiHopNet(nn.Module):
    """One encoder per hop of smoothed features; the joined codes are classified."""

    def __init__(self, adjacency, features, hidden, num_classes, hops):
        super().__init__()
        self.adjacency = adjacency
        self.hops = hops
        self.encoders = nn.ModuleList(HopEncoder(features, hidden) for _ in range(hops + 1))
        self.mix = nn.Linear(hidden * (hops + 1), hidden)
        self.classify = nn.Linear(hidden, num_classes)

    def propagate(self, x):
        smoothed = [x]
        for _ in range(self.hops):
            smoothed.append(torch.sparse.mm(self.adjacency, smoothed[-1]))
        return smoothed

    def forward(self, x):
        smoothed = self.propagate(x)  # waste: smoothing-in-every-forward
        # instead: if not hasattr(self, "smoothed"):
        # instead:     self.smoothed = self.propagate(x)
        # instead: smoothed = self.smoothed
        codes = [encoder(h) for encoder, h in zip(self.encoders, smoothed, strict=True)]
        return self.classify(F.relu(self.mix(torch.cat(codes, dim=1))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=8000)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--num-classes", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    generator = torch.Generator().manual_seed(1)
    edges, x, labels = make_graph(args.nodes, args.degree, args.num_classes, args.features, generator)
    adjacency = normalized_adjacency(edges, args.nodes).to(device)
    x, labels = x.to(device), labels.to(device)

    model = MultiHopNet(adjacency, args.features, args.hidden, args.num_classes, args.hops).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)

    for step in range(args.steps):
        logits = model(x)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            accuracy = (logits.argmax(dim=1) == labels).float().mean()
            print(f"epoch {step}: loss {loss.item():.6f} accuracy {accuracy.item():.4f}")
        # step


if __name__ == "__main__":
    main()
