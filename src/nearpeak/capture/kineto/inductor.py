"""What a kernel of Inductor's must write at the least, from the event that its launch leaves in the file.

The event has the tensors that the kernel was given and the sizes of its loops, and neither the names of the tensors nor
its code. Of what it reads nothing is certain: a table may be read in a few rows, a tensor in one half. Of what it
writes this is: Inductor passes tensors that are read and written first, then those that are read, then those that are
written; every kernel writes at least one; so the first or the last tensor is written. A pointwise kernel stores one
element per point of its loops, a reduction one per row, unless it scatters, where two points may store to one place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nearpeak.capture.kineto.tensors import Argument, Scalar, Seen
from nearpeak.work.tensor import ITEM_BYTES

_NAME = re.compile(r"triton_(poi|red|per)_fused_")
_SCATTERS = re.compile(r"scatter|index|embedding|_put|pool|upsample|grid_sampler|nll_loss_backward|fold|sort|bincount")
"""Names of operators that can become stores to computed places."""


def least_written(name: str, arguments: Sequence[Argument], facts: Mapping[str, Any]) -> tuple[int, str] | None:
    """How many elements of which dtype a kernel writes at the least; None where nothing is certain.

    >>> x = Seen((8192, 2048), (2048, 1), "bfloat16")
    >>> least_written("triton_poi_fused_add_0", (x, x, x, Scalar(16777216)), {"kernel_kwargs": "XBLOCK=1024"})
    (16777216, 'bfloat16')
    """
    match = _NAME.match(name)
    tensors = [argument for argument in arguments if isinstance(argument, Seen)]
    sizes = [argument.value for argument in arguments if isinstance(argument, Scalar)]
    if match is None or not tensors or _SCATTERS.search(name) or not all(_is_size(size) for size in sizes):
        return None
    loops = _loops(match[1], str(facts.get("kernel_kwargs", "")))
    if len(sizes) < loops:
        return None
    sizes = sizes[len(sizes) - loops :]  # before them are the sizes of dynamic shapes
    points = math.prod(sizes if match[1] == "poi" else sizes[:1])
    ends = [tensor.dtype for tensor in (tensors[0], tensors[-1]) if tensor.dtype is not None]
    return points, min(ends, key=lambda dtype: ITEM_BYTES[dtype])


def _loops(kind: str, blocks: str) -> int:
    """How many of the numbers at the end are sizes of loops. A persistent reduction has its own without a block."""
    pointwise = len(re.findall(r"\b[XYZ]BLOCK=", blocks)) or 1
    if kind == "poi":
        return pointwise
    return pointwise + (len(re.findall(r"\bR\d?_?BLOCK=", blocks)) or 1)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
