"""A data loader starts its workers again in every epoch, of a few batches each."""

import torch
from torch.utils.data import DataLoader, TensorDataset

RULE = "workers-restarted"
DEVICES = ("cpu", "cuda")
BATCHES = 6


def batches(loader):
    while True:
        yield from loader


def stepping(device, *, persistent):
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    x, weight = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    dataset = TensorDataset(torch.randn(4 * BATCHES, 16))
    following = batches(DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=persistent))  # waste

    def step():
        (batch,) = next(following)
        return (x @ weight).sum() + batch[0, 0]

    return step


def waste(device):
    return stepping(device, persistent=False)


def clean(device):
    return stepping(device, persistent=True)
