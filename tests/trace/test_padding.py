"""What counts as padding."""

import pytest
import torch

from nearpeak.ops.op import Padding
from nearpeak.trace.recorder import MAX_BATCH_ELEMENTS, padding_of


def ids(lengths, length=32, *, left=False, pad=0):
    torch.manual_seed(0)
    rows = torch.full((len(lengths), length), pad)
    for row, size in enumerate(lengths):
        rows[row, length - size if left else 0 :][:size] = torch.randint(1, 1000, (size,))
    return rows


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pad", [0, 50256])
def test_ids_are_padded_at_either_end(left, pad):
    assert padding_of(ids([8, 16, 24], left=left, pad=pad)) == Padding(rows=3, length=32, longest=24, mean=16.0)


def test_frames_are_padded_with_zeros():
    frames = torch.randn(4, 100, 8)
    frames[0, 50:] = 0
    frames[1, 75:] = 0
    assert padding_of(frames) == Padding(rows=4, length=100, longest=100, mean=81.25)
    assert padding_of(frames.transpose(0, 1).contiguous()) == padding_of(frames)


@pytest.mark.parametrize(
    "batch",
    [
        ids([32, 32, 32]),
        ids([31, 32, 32]),
        torch.zeros(8, 64, dtype=torch.int64),
        torch.randint(2, (8, 64)),
        torch.zeros(8, 4, dtype=torch.int64),
        ids([8])[0],
        torch.randn(4, 100, 8),
        torch.randn(8, 64),
        torch.zeros(1, dtype=torch.int64).expand(MAX_BATCH_ELEMENTS // 64 + 1, 64),
    ],
    ids=["full", "one short row", "zeros", "bits", "few fields", "one row", "frames", "numbers", "too many"],
)
def test_what_is_no_padding_or_cannot_be_told(batch):
    assert padding_of(batch) is None
