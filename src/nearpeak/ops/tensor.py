"""`Tensor`: shape, strides, dtype name and storage number of a tensor, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from nearpeak.ops.fast_init import fast_init

ITEM_BYTES: dict[str, float] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 0.5,
}
"""Bytes of one element, by torch's dtype names."""


class Sparse(NamedTuple):
    """What a sparse tensor is, besides its memory."""

    stored: int
    """The number of its values."""
    shape: tuple[int, ...]


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A view of a storage. Tensors with the same `storage` number share memory.

    >>> row = Tensor(shape=(4, 1024), strides=(0, 1), dtype="float32", storage=0)  # one row, expanded to four
    >>> row.elements, row.bytes
    (4096, 4096.0)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    offset: int = 0
    """In elements, from the start of the storage."""
    sparse: Sparse | None = None
    """Of a sparse tensor, which counts as an empty one on the memory of its values."""

    @property
    def elements(self) -> int:
        """The number of elements, expanded ones included."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> float:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> float:
        """Bytes of memory behind it: an expanded dimension counts once, overlapping windows count what they span."""
        distinct = spanned = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 0:
                return 0.0
            if stride:
                distinct *= size
                spanned += (size - 1) * abs(stride)
        return float(min(distinct, spanned) * ITEM_BYTES[self.dtype])

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.startswith(("float", "bfloat"))
