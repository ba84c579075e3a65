"""What values tell: padding, and matrices of zeros."""

import pytest
import torch

from nearpeak.ops.op import Padding
from nearpeak.trace.seen_values import padding_of
from nearpeak.trace.trace import trace


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


@pytest.mark.parametrize(
    "product",
    [
        lambda: torch.eye(100).to_sparse() @ torch.ones(100, 64),
        lambda: torch.eye(100, dtype=torch.complex64) @ torch.ones(100, 64, dtype=torch.complex64),
        lambda: torch.ones(0, 100) @ torch.ones(100, 64),
        lambda: torch.ones(4, 64, 0) @ torch.ones(4, 0, 64),
        lambda: torch.eye(100, dtype=torch.int64) @ torch.ones(100, 64, dtype=torch.int64),
        lambda: torch.nn.functional.one_hot(torch.zeros(0, dtype=torch.int64), 4096),
        lambda: torch.arange(64 * 64).view(64, 64)[torch.zeros(0, dtype=torch.int64)],
        lambda: torch.randn(64, 64)[torch.rand(64, 64) > 0.5],
        lambda: torch.randn(4, 0, 64).view(-1, 64),
    ],
    ids=["sparse", "complex", "no rows", "no depth", "integers", "no vectors", "no ids", "mask", "no frames"],
)
def test_what_cannot_be_looked_at_is_recorded_all_the_same(product):
    assert trace(product, live=True).ops


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), True),
        (torch.full((8, 8), -torch.inf).triu(1).expand(2, 3, 8, 8), True),
        (torch.ones(8, 8, dtype=torch.bool).tril() & torch.ones(8, 8, dtype=torch.bool).triu(-2), False),  # a window
        (torch.full((8, 8), -1.0).triu(1), False),  # a bias
        (torch.ones(8, 8, dtype=torch.bool).tril().repeat(2, 1, 1, 1), False),  # one for each sequence
    ],
    ids=["allowed", "added", "window", "bias", "batch"],
)
def test_a_mask_of_attention_is_causal_by_its_values(mask, causal):
    query, key, value = torch.randn(3, 2, 3, 8, 16).unbind()
    attention = torch.nn.functional.scaled_dot_product_attention
    seen = trace(lambda: attention(query, key, value, attn_mask=mask), live=True)
    assert bool(seen.causal_masks) is causal
