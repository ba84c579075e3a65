"""`padding_of`: how much of a batch of sequences is padding, by its values.

Batches are looked at where an op reads them first: token ids where they are looked up, frames of numbers where a
recurrent network or a convolution begins. This happens in the one step that is traced, which is not timed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nearpeak.ops.op import Padding

SEQUENCE_READERS: Mapping[str, int] = {
    "aten.embedding.default": 1,
    "aten.lstm.input": 0,
    "aten.gru.input": 0,
    "aten._cudnn_rnn.default": 0,
    "aten.mkldnn_rnn_layer.default": 0,
}
"""Operators that read batches of sequences, and the position of that argument."""
MAX_ELEMENTS = 1 << 24
"""Larger batches are not looked at."""
MIN_LENGTH = 16
"""Elements of a row. A few fields of a record are no sequence."""
MIN_SHARE = 0.05
"""Of the batch. Less padding is not worth mentioning."""
MAX_INSIDE = 0.02
"""The value that rows end with is padding if no larger share of the other elements has it."""


def padding_of(batch: torch.Tensor) -> Padding | None:
    """The padding of a batch of sequences; None if there is little of it, or it cannot be told.

    A batch of ids is (rows, length), one of frames (rows, length, features) or (length, rows, features). Padding is one
    value at the end of rows, or at their start, that hardly occurs elsewhere in them; frames are padded with zeros.

    >>> padding_of(torch.tensor([[5, 7, 9, 4] * 4, [3, 8] + [0] * 14]))
    Padding(rows=2, length=16, longest=16, mean=9.0)
    """
    if batch.numel() > MAX_ELEMENTS or batch.layout is not torch.strided or batch.is_nested:
        return None
    with torch.no_grad():
        if batch.dim() == 2 and not batch.is_floating_point():
            return _longer_padding([_padding_of_ids(batch.cpu())])
        if batch.dim() == 3 and batch.is_floating_point():
            empty = (batch == 0).all(dim=-1).cpu()
            return _longer_padding([_padding(empty), _padding(empty.T)])
    return None


def _padding_of_ids(ids: torch.Tensor) -> Padding | None:
    if ids.shape[1] < MIN_LENGTH or len(ids) < 2:
        return None
    return _longer_padding([_padding(ids == ids[:, column].mode().values) for column in (-1, 0)])


def _longer_padding(candidates: list[Padding | None]) -> Padding | None:
    known = [padding for padding in candidates if padding is not None]
    return min(known, key=lambda padding: padding.mean / padding.length, default=None)


def _padding(empty: torch.Tensor) -> Padding | None:
    """From where elements are the value that may be padding (rows, length)."""
    rows, length = empty.shape
    if length < MIN_LENGTH or rows < 2:
        return None
    for mask in (empty, empty.flip(1)):  # at the end of rows, at their start
        places = torch.arange(1, length + 1)
        lengths = ((~mask) * places).amax(dim=1)
        filled = int(lengths.sum())
        inside = int(mask.sum()) - (rows * length - filled)
        padded = 1 - filled / (rows * length)
        if padded >= MIN_SHARE and inside <= MAX_INSIDE * filled and 2 * int((lengths == 0).sum()) < rows:
            return Padding(rows=rows, length=length, longest=int(lengths.max()), mean=filled / rows)
    return None
