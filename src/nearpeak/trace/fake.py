"""`fake()`: build models and tensors of any size without memory, and code written for CUDA on a machine without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode

from nearpeak.trace.patches.cuda_on_cpu import cuda_on_cpu
from nearpeak.trace.patches.real_imports import real_imports
from nearpeak.trace.patches.shared_patch import SharedPatch

_MEMO_SIZE = 64
_SHORT_RANGE = 64


class _BoundedMemo(dict[Any, Any]):
    """The fake mode's memo of converted tensors, without weak references and of bounded size.

    torch refuses `module.to(dtype)` for a fake parameter with weak references, which its own memo has. Only the last
    few entries are ever looked up again.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= _MEMO_SIZE:
            del self[next(iter(self))]
        super().__setitem__(key, value)


class _SharedMode:
    """The one fake mode of every `fake()`: tensors of two modes cannot be in one op."""

    mode: FakeTensorMode | None = None


def fake_mode() -> FakeTensorMode:
    """The fake mode that all tensors built inside `fake()` belong to."""
    if _SharedMode.mode is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # no subclass: torch looks its rules up by the exact type
        mode.fake_tensor_converter.meta_converter.tensor_memo = _BoundedMemo()  # type: ignore[assignment]
        mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]  # a copied tensor keeps its mode
        _SharedMode.mode = mode
    return _SharedMode.mode


@contextmanager
def fake() -> Iterator[None]:
    """Tensors and modules that are built inside have shapes, strides and dtypes, and no memory.

    Where torch has no CUDA, `device="cuda"`, `.cuda()` and `.to("cuda")` give the CPU's fake tensors, so that code
    written for a GPU runs as it is.

    >>> with fake():
    ...     weights = torch.empty(70_000_000_000, device="cuda", dtype=torch.bfloat16)
    >>> weights.untyped_storage().nbytes()
    140000000000
    """
    with real_imports(), fake_mode(), DeepcopyMode(), _SmallRangesMode(), allow_building(), cuda_on_cpu():
        yield


@contextmanager
def fresh_conversions(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, `mode` converts each real tensor anew: a trace does not see what an earlier one did to its copy."""
    before = mode.fake_tensor_converter
    mode.fake_tensor_converter = FakeTensorConverter(export=False)
    try:
        yield
    finally:
        mode.fake_tensor_converter = before


class DeepcopyMode(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors, fake ones and real ones, to fake ones; torch would copy their data."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__ or not args[0].is_leaf or args[0].layout is not torch.strided:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if _is_parameter(tensor) else copy
        return memo[id(tensor)]


class _SmallRangesMode(TorchFunctionMode):
    """Keeps the values of short linear ranges, which constructors read: rates that grow from layer to layer.

    Tensors computed from such ranges alone have values too.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        steps = kwargs.get("steps", args[2] if len(args) > 2 else None)
        linear_range = func is torch.linspace and isinstance(steps, int) and steps <= _SHORT_RANGE
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        small = bool(tensors) and all(
            type(value) is torch.Tensor and value.numel() <= _SHORT_RANGE for value in tensors
        )
        if linear_range or small:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@SharedPatch
@contextmanager
def allow_building() -> Iterator[None]:
    """Patches that models need while they are built and converted."""
    with _skip_truncated_normal(), _convert_in_place():
        yield


@contextmanager
def _skip_truncated_normal() -> Iterator[None]:
    """Inside, a truncated normal leaves fake tensors alone: it would redraw until their values are in range."""
    original = torch.nn.init._no_grad_trunc_normal_

    def leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = leave
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


@contextmanager
def _convert_in_place() -> Iterator[None]:
    """Inside, `module.to(dtype)` of a fake module replaces its parameters; tied ones stay tied.

    torch swaps the memory of a fake parameter with that of its converted copy, and refuses if anything else refers to
    it, such as an embedding's padding row.
    """
    original: Any = torch.nn.Module._apply
    converted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    depth = 0

    def convert(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in converted:
            with torch.no_grad():
                new = function(tensor)
            if _is_parameter(tensor):
                new = torch.nn.Parameter(new, tensor.requires_grad)
            converted[id(tensor)] = (tensor, new)  # the old one is stored to keep its id unique
        return converted[id(tensor)][1]

    def apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        nonlocal depth
        tensors_of_module = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and not isinstance(tensor, FakeTensor) for tensor in tensors_of_module):
            return original(module, function, recurse)
        depth += 1
        try:
            children: list[Any] = list(module.children()) if recurse else []
            for child in children:
                child._apply(function)
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in places:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = convert(tensor, function)
        finally:
            depth -= 1
            if depth == 0:
                converted.clear()
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)
