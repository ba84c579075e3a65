"""`follow_assigned_data`: `tensor.data = other` and subclasses of tensors, which torch handles past its dispatcher.

Code on real tensors computes fake ones. Given to a real tensor as its data, they take its memory away, and torch says
nothing of it to a trace. A subclass without a dispatch of its own wraps every result, which a fake tensor refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder


@SharedPatch
@contextmanager
def follow_assigned_data() -> Iterator[None]:
    """Inside, a real tensor that is given fake data has them in the trace; results of subclasses are fake tensors."""
    data: Any = torch.Tensor.data
    convert: Any = torch._tensor._convert

    def get(tensor: torch.Tensor) -> torch.Tensor:
        recorder = None if isinstance(tensor, FakeTensor) else active_recorder()
        assigned = None if recorder is None else recorder.assigned_data(tensor)
        return data.__get__(tensor) if assigned is None else data.__get__(assigned)  # type: ignore[no-any-return]

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        recorder = None if isinstance(tensor, FakeTensor) or not isinstance(value, FakeTensor) else active_recorder()
        if recorder is not None:
            recorder.meet(tensor)
        data.__set__(tensor, value)
        if recorder is not None:
            recorder.assign_data(tensor, value)  # type: ignore[arg-type]

    def convert_real(result: Any, kind: type) -> Any:
        return result if isinstance(result, FakeTensor) else convert(result, kind)

    torch.Tensor.data = property(get, assign)  # type: ignore[assignment]
    try:
        with patch_attribute(torch._tensor, "_convert", convert_real):
            yield
    finally:
        del torch.Tensor.data
