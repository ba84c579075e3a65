"""Tables of addresses on the device, for kernels that work on many tensors in one launch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch

_CARRIED = 16
"""Numbers that one launch of `write_kernel` carries."""
_ABOVE = 2**48
"""Added to each of them, as Triton would compile another kernel for a number that fits into 32 bits."""
_ready: set[torch.device] = set()


class Kept:
    """The tables that were used last, by what is in them. A table stays while a CUDA graph may use it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._recorded: dict[Hashable, Any] = {}

    def get(self, key: Hashable, device: torch.device, make: Callable[[Any], Any]) -> Any:
        """What `make(key)` returned before, or returns now."""
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        found = self._entries.get(key)
        if recording:
            if found is None:
                return make(key)  # in the graph's own memory, and written by each replay: of no use outside
            self._recorded[key] = found
            return found[1]
        if found is not None and found[0] == stream:
            self._entries.move_to_end(key)
            return found[1]
        # the memory of a table may only be given back in the order of the stream that used it: one for each stream
        made = make(key)
        self._entries[key] = stream, made
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)
        return made


def uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of 64 bits on the device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64)
    if not torch.cuda.is_current_stream_capturing():
        table = torch.tensor(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
        if device not in _ready:  # compiles the kernel: nothing can be loaded while a graph is recorded
            write(table[:1], numbers[:1])
            _ready.add(device)
        return table
    table = torch.empty(len(numbers), dtype=torch.int64, device=device)
    write(table, numbers)
    return table


def write(table: Tensor, numbers: Sequence[int]) -> None:
    """Writes numbers into a table as arguments of launches, which a CUDA graph records; host memory could be gone."""
    for at in range(0, len(numbers), _CARRIED):
        carried = [number + _ABOVE for number in numbers[at : at + _CARRIED]]
        carried += [_ABOVE] * (_CARRIED - len(carried))
        launch(write_kernel, (1, 1, 1), table, at, len(numbers), *carried, _ABOVE, warps=1)


@triton.jit
def _write(table, at, end, number, ABOVE: tl.constexpr):
    if at < end:
        tl.store(table + at, number - ABOVE)


@triton.jit(do_not_specialize=["at", "end", *(f"n{index}" for index in range(16))])
def write_kernel(
    table, at, end, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, ABOVE: tl.constexpr
):  # fmt: skip
    _write(table, at, end, n0, ABOVE)
    _write(table, at + 1, end, n1, ABOVE)
    _write(table, at + 2, end, n2, ABOVE)
    _write(table, at + 3, end, n3, ABOVE)
    _write(table, at + 4, end, n4, ABOVE)
    _write(table, at + 5, end, n5, ABOVE)
    _write(table, at + 6, end, n6, ABOVE)
    _write(table, at + 7, end, n7, ABOVE)
    _write(table, at + 8, end, n8, ABOVE)
    _write(table, at + 9, end, n9, ABOVE)
    _write(table, at + 10, end, n10, ABOVE)
    _write(table, at + 11, end, n11, ABOVE)
    _write(table, at + 12, end, n12, ABOVE)
    _write(table, at + 13, end, n13, ABOVE)
    _write(table, at + 14, end, n14, ABOVE)
    _write(table, at + 15, end, n15, ABOVE)
