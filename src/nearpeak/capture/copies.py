"""`Copies`: the fake copies of real tensors within one trace."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from nearpeak.capture.untouched import Untouched


class Copies:
    """One fake copy for each real tensor."""

    def __init__(self, mode: FakeTensorMode, untouched: Untouched) -> None:
        self._mode = mode
        self._untouched = untouched
        self._fakes: dict[int, tuple[torch.Tensor, FakeTensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake copy of a real tensor: its strides, its storage shared with the copies of its other views."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known[1]
        self._untouched.leaf(tensor)
        if _is_number(tensor):  # an optimizer's count of steps, say: its value may be asked for
            with no_dispatch():
                value = tensor.clone()
            copy = self._mode.fake_tensor_converter.from_real_tensor(self._mode, value, make_constant=True)
        else:
            copy = self._mode.from_tensor(tensor)
        self._fakes[id(tensor)] = (tensor, copy)
        return copy

    def faked(self, value: Any, originals: dict[int, torch.Tensor]) -> Any:
        """A value with copies for all real tensors, which are added to `originals` by the ids of their copies."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            copy = self.of(value)
            if copy is not value:
                originals[id(copy)] = value
            return copy
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)([self.faked(item, originals) for item in value])
        if isinstance(value, dict):
            return {key: self.faked(item, originals) for key, item in value.items()}
        return value


def restored(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    """In-place operators give back the tensor they were given, not its copy."""
    if isinstance(result, torch.Tensor):
        return originals.get(id(result), result)
    if type(result) in (list, tuple):
        return type(result)([restored(item, originals) for item in result])
    return result


def _is_number(tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 0
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.element_size()
    )


def is_small(tensor: torch.Tensor) -> bool:
    """Whether torch keeps the value of a real tensor in its fake copy: it has one element or none."""
    return (
        type(tensor) is torch.Tensor
        and tensor.numel() <= 1
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
