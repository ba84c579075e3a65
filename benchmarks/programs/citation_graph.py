"""Classifies the papers of a citation graph with a graph network."""

# cpu: --papers 1500 --width 64
# cuda: --papers 20000 --width 256

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class GraphLayer(nn.Module):
    """Every paper takes the mean of what it cites, and of itself."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.cited = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, graph):
        # mend: dense-adjacency
        around = graph @ self.cited(x)  # waste: dense-adjacency
        # instead: papers, cited, weights = graph
        # instead: sent = self.cited(x)
        # instead: around = torch.zeros_like(sent).index_add(0, papers, sent[cited] * weights[:, None])
        return self.own(x) + around


class GraphNetwork(nn.Module):
    def __init__(self, words, width, classes):
        super().__init__()
        self.first = GraphLayer(words, width)
        self.second = GraphLayer(width, width)
        self.third = GraphLayer(width, classes)

    def forward(self, x, graph):
        x = F.relu(self.first(x, graph))
        x = F.relu(self.second(x, graph))
        return self.third(x, graph)


def citations(papers, each, device, dtype):
    """A graph in which every paper cites some others; its rows sum to one."""
    cited = torch.randint(papers, (papers, each), device=device)
    # mend: dense-adjacency
    graph = torch.zeros(papers, papers, device=device, dtype=dtype)
    graph.scatter_(1, cited, 1.0)
    return graph / graph.sum(1, keepdim=True)
    # instead: rows = torch.arange(papers, device=device).repeat_interleave(each)
    # instead: return rows, cited.flatten(), torch.full((papers * each,), 1 / each, device=device, dtype=dtype)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--papers", type=int, default=20000)
    parser.add_argument("--citations", type=int, default=8)
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32
    graph = citations(args.papers, args.citations, device, dtype)
    words = torch.randn(args.papers, args.words, device=device, dtype=dtype)
    subjects = torch.randint(args.classes, (args.papers,), device=device)
    known = torch.arange(0, args.papers, 2, device=device)
    model = GraphNetwork(args.words, args.width, args.classes).to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for step in range(args.steps):
        scores = model(words, graph)
        loss = F.cross_entropy(scores[known], subjects[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            right = (scores.argmax(1) == subjects).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, {right.item():.1%} right")
        # step


if __name__ == "__main__":
    main()
