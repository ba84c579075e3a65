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
from torch.utils._mode_utils import no_dispatch

from nearpeak.trace.known_values import BUILT_WITH, MAX_ELEMENTS, KnownValues
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
    with real_imports(), fake_mode(), PythonMode(), _SmallValuesMode(), allow_building(), cuda_on_cpu():
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


class PythonMode(TorchFunctionMode):
    """What Python asks of a tensor itself.

    `copy.deepcopy` copies tensors, fake ones and real ones, to fake ones; torch would copy their data. In a trace,
    numbers are written as text, and small tensors become arrays of NumPy's, where their values are known.
    """

    def __init__(self, known: KnownValues | None = None) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return _deepcopy(*args) if args[0].is_leaf and args[0].layout is torch.strided else func(*args)
        if self._known is not None and func in _PYTHON_VALUES:
            if func is torch.Tensor.__format__:
                return format(args[0].item(), *args[1:]) if args[0].dim() == 0 else func(*args)
            array = self._known.array(args[0])
            if array is not None:
                return array
        return func(*args, **(kwargs or {}))


_PYTHON_VALUES = frozenset({torch.Tensor.__format__, torch.Tensor.numpy, torch.Tensor.__array__})


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if _is_parameter(tensor) else copy
    return memo[id(tensor)]


class _SmallValuesMode(TorchFunctionMode):
    """Keeps the values of short linear ranges, which constructors read, and notes those of small tensors for traces.

    Ranges are rates that grow from layer to layer; they and what is computed from them alone are real tensors. Masks
    and sizes that are built from constants get a note of their values: see `known_values`.
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
        noted = func in _FROM_CONSTANTS or (bool(tensors) and all(_built_with(value) is not None for value in tensors))
        values = [(_real(value), value) for value in tensors] if noted else []
        result = func(*args, **kwargs)
        if (
            noted
            and not torch.is_inference_mode_enabled()
            and (result is None or (type(result) is FakeTensor and result.numel() <= MAX_ELEMENTS))
        ):
            _note_values(func, args, kwargs, result, values)
        return result


_FROM_CONSTANTS = (torch.ones, torch.zeros, torch.full, torch.arange, torch.tensor, torch.eye)


def _built_with(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a fake tensor that was built from constants and not changed since by an op that has no note."""
    note = tensor.__dict__.get(BUILT_WITH) if type(tensor) is FakeTensor else None
    return note[0] if note is not None and not tensor.is_inference() and note[1] == tensor._version else None


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _built_with(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _note_values(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: FakeTensor | None,
    values: list[tuple[Any, torch.Tensor]],
) -> None:
    """Runs a function of torch on values too, and notes them at its result and at what it changed in place."""
    real = {id(tensor): value for value, tensor in values}
    try:
        # Without the recorder too: this is no op of the program's.
        with unset_fake_temporarily(), no_dispatch(), torch._C.DisableTorchFunction():
            plain = {name: "cpu" if name == "device" else item for name, item in kwargs.items()}
            value = func(
                *[real.get(id(item), _real(item)) for item in args],
                **{name: real.get(id(item), item) for name, item in plain.items()},
            )
    except Exception:  # of a kind that has no values here
        return
    for known, tensor in values:
        tensor.__dict__[BUILT_WITH] = (known, tensor._version)
    if (
        result is not None
        and type(value) is torch.Tensor
        and (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
        and value.storage_offset() == 0 == result.storage_offset()
        and not result.requires_grad
    ):
        result.__dict__[BUILT_WITH] = (value, result._version)


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
