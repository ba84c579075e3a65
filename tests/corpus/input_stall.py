"""Each step waits for a loader without workers, whose samples take a while."""

import time

import torch
from torch.utils.data import DataLoader, IterableDataset

RULE = "input-stall"
DEVICES = ("cpu", "cuda")


class Samples(IterableDataset):
    def __init__(self, slow):
        self.slow = slow
        self.sample = torch.randn(16, 16)

    def __iter__(self):
        while True:
            if self.slow:
                time.sleep(0.002)  # a file is read and decoded
            yield self.sample


def parts(device):
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    return [torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)]


def waste(device):
    x, weight = parts(device)
    batches = iter(DataLoader(Samples(slow=True), batch_size=4))

    def step():
        batch = next(batches)  # waste
        return (x @ weight).sum() + batch[0, 0, 0]

    return step


def clean(device):
    x, weight = parts(device)
    batch = next(iter(DataLoader(Samples(slow=False), batch_size=4)))

    def step():
        return (x @ weight).sum() + batch[0, 0, 0]

    return step
