"""Many small ops, each of which runs for less time than it takes to launch; the twin replays them as a CUDA graph."""

import torch

RULE = "launch-bound"
DEVICES = ("cuda",)
OPS = 1000


def run(x):
    for _ in range(OPS):
        x = torch.cumsum(x, -1)
    return x


def waste(device):
    x = torch.zeros(128, 128, device=device)
    return lambda: run(x)


def clean(device):
    x = torch.zeros(128, 128, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x)
    return graph.replay
