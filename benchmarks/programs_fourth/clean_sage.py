"""Train a GraphSAGE classifier on a large graph with neighbours sampled on the device."""

# cpu: --nodes 20000 --batch-size 640 --width 96
# cuda: --nodes 1000000 --batch-size 8192 --width 512

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Graph:
    """Adjacency in compressed rows, features and labels, all on the device."""

    def __init__(self, nodes, features, classes, device):
        self.degree = torch.randint(3, 25, (nodes,), device=device)
        self.start = self.degree.cumsum(0) - self.degree
        edges = int(self.degree.sum())
        self.label = torch.randint(classes, (nodes,), device=device)
        self.neighbour = torch.randint(nodes, (edges,), device=device)
        centers = torch.randn(classes, features, device=device)
        self.feature = 0.5 * centers[self.label] + torch.randn(nodes, features, device=device)

    def sample(self, nodes, count):
        """Random neighbours of each node, with replacement; shape (nodes, count)."""
        draw = torch.rand(nodes.shape[0], count, device=nodes.device)
        offset = (draw * self.degree[nodes][:, None]).long()
        return self.neighbour[self.start[nodes][:, None] + offset]


class SageLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.around = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, neighbours):
        return self.own(x) + self.around(neighbours.mean(dim=1))


class GraphSage(nn.Module):
    def __init__(self, features, width, classes, dropout=0.2):
        super().__init__()
        self.first = SageLayer(features, width)
        self.second = SageLayer(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph, roots, near, far):
        """near: neighbours of the roots; far: neighbours of the roots and of near, in this order."""
        seen = torch.cat([roots, near.flatten()])
        x = self.first(graph.feature[seen], graph.feature[far])
        x = self.dropout(F.relu(self.norm1(x)))
        own, around = x.split([len(roots), near.numel()])
        x = self.second(own, around.view(*near.shape, -1))
        return self.head(self.dropout(F.relu(self.norm2(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=20000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=640)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--near", type=int, default=10)
    parser.add_argument("--far", type=int, default=8)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    classes = 20
    graph = Graph(args.nodes, args.features, classes, device)
    model = GraphSage(args.features, args.width, classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    train = torch.randperm(args.nodes, device=device)[: args.nodes // 2]
    batches = max(len(train) // args.batch_size, 1)
    right = torch.zeros((), device=device)

    for step in range(args.steps):
        if step % batches == 0:
            train = train[torch.randperm(len(train), device=device)]
        roots = train[step % batches * args.batch_size :][: args.batch_size]
        near = graph.sample(roots, args.near)
        far = graph.sample(torch.cat([roots, near.flatten()]), args.far)
        scores = model(graph, roots, near, far)
        labels = graph.label[roots]
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = 0.9 * right + 0.1 * (scores.detach().argmax(dim=1) == labels).float().mean()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, right {right.item():.3f}")
        # step


if __name__ == "__main__":
    main()
