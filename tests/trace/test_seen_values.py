"""What values tell: padding, and matrices of zeros."""

import pytest
import torch

from nearpeak.ops.op import Padding
from nearpeak.trace.seen_values import padding_of


def ids(lengths, length=32, *, left=False, pad=0):
    torch.manual_seed(0)
    rows = torch.full((len(lengths), length), pad)
    for row, size in enumerate(lengths):
        rows[row, length - size if left else 0 :][:size] = torch.randint(1, 1000, (size,))
    return rows


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pad", [0, 50256])
def test_ids_are_padded_at_either_end(left, pad):
    assert padding_of(ids([8, 16, 24], left=left, pad=pad)) == Padding(length=32, lengths=(8, 16, 24), stride=1)


def test_frames_are_padded_with_zeros():
    frames = torch.randn(4, 100, 8)
    frames[0, 50:] = 0
    frames[1, 75:] = 0
    assert padding_of(frames) == Padding(length=100, lengths=(50, 75, 100, 100), stride=8)
    time_first = padding_of(frames.transpose(0, 1).contiguous())
    assert time_first == Padding(length=100, lengths=(50, 75, 100, 100), stride=32)


@pytest.mark.parametrize(
    "batch",
    [
        ids([32, 32, 32]),
        ids([31, 32, 32]),
        torch.zeros(8, 64, dtype=torch.int64),
        torch.randint(2, (8, 64)),
        torch.zeros(8, 4, dtype=torch.int64),
        torch.randn(4, 100, 8),
    ],
    ids=["full", "one short row", "zeros", "bits", "few fields", "frames"],
)
def test_what_is_no_padding_or_cannot_be_told(batch):
    assert padding_of(batch) is None
