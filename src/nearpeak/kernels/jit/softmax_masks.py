"""Masks of a softmax: any that broadcasts to the scores, by its strides and without a copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NONE, BOOLEAN, ADDITIVE = 0, 1, 2
Place = tuple[int, int, int, int, int, int]
"""Of the rows, two sizes and three strides, from the outside in; and the stride of columns. See `locate`."""


def masked_by(mask: Tensor, x: Tensor) -> tuple[int, Tensor, Place]:
    """The kind of a mask, its memory, and where in it the mask of a row of `x` is.

    Dimensions of rows with one stride between them count as one. Where more than three are left, which takes `x` of
    five dimensions or more, the mask is copied for all rows; and where its columns are apart, it is copied too.
    """
    kind = BOOLEAN if mask.dtype == torch.bool else ADDITIVE
    if mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) > 1:
        # once, and not for each row that it is expanded to
        mask = mask[tuple(slice(None) if stride else slice(1) for stride in mask.stride())].contiguous()
    whole = mask.expand(x.shape)
    groups = _groups(whole)
    if len(groups) > 3:
        whole = whole.contiguous()
        groups = _groups(whole)
    (_, outer_step), (middle, middle_step), (inner, inner_step) = [(1, 0)] * (3 - len(groups)) + groups
    step = whole.stride(-1) if whole.dim() else 0
    return kind, whole, (middle * inner, inner, outer_step, middle_step, inner_step, step)


def _groups(whole: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions of rows, with those merged that one stride leads through."""
    groups: list[tuple[int, int]] = []
    for size, stride in zip(whole.shape[:-1], whole.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    return groups


@triton.jit
def locate(row, outer, middle, outer_step, middle_step, inner_step, WIDTH: tl.constexpr):
    """How far into its memory the mask of a row starts; `outer` and `middle` are rows per step of these."""
    return (
        row // outer * (outer_step // WIDTH * WIDTH)
        + row % outer // middle * (middle_step // WIDTH * WIDTH)
        + row % middle * (inner_step // WIDTH * WIDTH)
    )
