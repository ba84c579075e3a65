"""Full-batch GraphSAGE with mean aggregation on a citation graph with a heavy-tailed in-degree."""

# cpu: --nodes 4000 --degree 12 --features 32 --hidden 96 --classes 16
# cuda: --nodes 200000 --degree 14 --features 128 --hidden 256 --classes 40

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Graph:
    """Edges of a fixed graph, sorted by the node they point to."""

    def __init__(self, source, target, nodes):
        order = target.argsort()
        self.source, self.target = source[order], target[order]
        self.nodes = nodes
        self.degree = torch.bincount(self.target, minlength=nodes).clamp(min=1).unsqueeze(1)

    def neighbour_mean(self, x):
        messages = x.index_select(0, self.source)  # waste: messages-before-narrowing
        # instead: messages = x.index_select(0, self.source)
        index = self.target.unsqueeze(1).expand_as(messages)
        total = x.new_zeros(self.nodes, x.size(1)).scatter_add_(0, index, messages)
        # mend: counts-at-full-width
        count = torch.zeros_like(total).scatter_add_(0, index, torch.ones_like(messages))  # waste: counts-at-full-width
        return total / count.clamp(min=1)  # waste: counts-at-full-width
        # instead: return total / self.degree


class SageLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)
        self.narrows = outputs < inputs

    def forward(self, graph, x):
        # mend: messages-before-narrowing
        gathered = self.neighbours(graph.neighbour_mean(x))  # waste: messages-before-narrowing
        # instead: late, early = self.neighbours, graph.neighbour_mean
        # instead: gathered = early(late(x)) if self.narrows else late(early(x))
        return self.own(x) + gathered


class Sage(nn.Module):
    def __init__(self, features, hidden, classes, dropout=0.3):
        super().__init__()
        self.layers = nn.ModuleList(
            [SageLayer(features, hidden), SageLayer(hidden, hidden), SageLayer(hidden, classes)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm1d(hidden), nn.BatchNorm1d(hidden)])
        self.dropout = dropout

    def forward(self, graph, x):
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = F.dropout(F.relu(norm(layer(graph, x))), self.dropout, self.training)
        return self.layers[-1](graph, x)


class Trainer:
    def __init__(self, model, graph, features, labels, train_mask):
        self.model, self.graph = model, graph
        self.features, self.labels = features, labels
        self.rows = train_mask.nonzero().squeeze(1)
        self.targets = labels[self.rows]
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)

    def training_step(self):
        logits = self.model(self.graph, self.features)
        loss = F.cross_entropy(logits[self.rows], self.targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def citation_graph(nodes, degree, features, classes, device):
    labels = torch.randint(0, classes, (nodes,), device=device)
    source = torch.randint(0, nodes, (nodes * degree,), device=device)
    skewed = torch.rand(nodes * degree, device=device).square()
    target = (skewed * nodes).long().clamp(max=nodes - 1)
    centres = torch.randn(classes, features, device=device)
    x = centres[labels] + 2.0 * torch.randn(nodes, features, device=device)
    return Graph(source, target, nodes), x, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--degree", type=int, default=12)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--classes", type=int, default=16)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph, x, labels = citation_graph(args.nodes, args.degree, args.features, args.classes, device)
    model = Sage(args.features, args.hidden, args.classes).to(device)
    trainer = Trainer(model, graph, x, labels, torch.rand(args.nodes, device=device) < 0.5)

    for step in range(args.steps):
        loss = trainer.training_step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"epoch {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
