"""Replays of recorded calls: allocate, launch, return, with nothing left to decide.

Shapes, strides, dtypes, alignment and options of the arguments determine what a function of this package does. Deciding takes
several times as long as a launch. The second call with the same signature is therefore recorded: the tensors that it allocates
and the kernels that it launches. Later calls with this signature replay that. A call that does anything else, such as copying a
tensor first, is never replayed.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""The types of tensors that are memory, and nothing else."""
_VALUE_TYPES = frozenset((int, float, bool, str, type(None), torch.dtype))
"""The types of arguments that count by their value."""
_MOST_REPLAYS = 4096
"""Plans of one function, before it starts anew: shapes may come that never come again."""
_ALIGNMENT_MASK = 15
"""Kernels have variants for pointers to multiples of 16 bytes, and no finer ones."""
_SEEN_ONCE, _NOT_REPLAYABLE = "once", "never"
"""Of calls without a plan: their like was made once, or cannot be made by one."""

_is_grad_enabled = torch.is_grad_enabled
_dispatch_mode_count = torch._C._len_torch_dispatch_stack
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_is_profiler_enabled = torch._C._autograd._profiler_enabled

StartKernel = Callable[[tuple[int, int, int], int, Sequence[Any]], None]
"""Starts a kernel, by its grid, the stream and the arguments, of which tensors are pointers."""


class _ThreadState(threading.local):
    recording: CallRecorder | None = None


_thread_state = _ThreadState()


def active_recording() -> CallRecorder | None:
    """What is told of launches on this thread."""
    return _thread_state.recording


def is_observed() -> bool:
    """Whether someone is to see operators: a dispatch mode, a transform such as vmap, or a profiler."""
    own = 0 if _thread_state.recording is None else 1
    return bool(_dispatch_mode_count() > own or _functorch_interpreter() is not None or _is_profiler_enabled())


def is_tensor_descriptor(argument: Any) -> bool:
    """Whether an argument of a kernel describes how to copy tiles of a tensor, and so has its address in it."""
    return isinstance(getattr(argument, "base", None), Tensor)


class RecordedLaunch(NamedTuple):
    """A kernel to be started."""

    start: StartKernel
    grid: tuple[int, int, int]
    arguments: list[Any]
    pointers: list[tuple[int, int, int]]
    """Where among the arguments a pointer goes, to which tensor of all, and how many bytes into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What calls of one kind do."""

    device: int
    allocations: tuple[Callable[[], Tensor], ...]
    launches: tuple[RecordedLaunch, ...]
    result: Any
    """Which of the allocations: a number, None, or a tuple of these."""

    def run(self, addresses: list[int]) -> Any:
        """Makes a call on the current device, with tensors at these addresses."""
        made = []
        for allocate in self.allocations:
            tensor = allocate()
            made.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for start, grid, template, pointers in self.launches:
            arguments = template.copy()
            for place, source, offset in pointers:
                arguments[place] = addresses[source] + offset
            start(grid, stream, arguments)
        result = self.result
        return made[result] if type(result) is int else _select_results(result, made)


def _select_results(result: Any, made: list[Tensor]) -> Any:
    if isinstance(result, tuple):
        return tuple(_select_results(one, made) for one in result)
    return None if result is None else made[result]


def _call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[int]] | None:
    """What arguments look like, and the addresses of tensors; None where there can be no plan."""
    differentiable = _is_grad_enabled()
    look: list[Any] = []
    addresses: list[int] = []
    try:
        for one in (*args, *kwargs.values(), tuple(kwargs)) if kwargs else args:
            kind = type(one)
            if kind in PLAIN_TENSORS:
                if differentiable and one.requires_grad:
                    return None
                address = one.data_ptr()
                addresses.append(address)
                look += one.shape, one.stride(), one.dtype, one.device, address & _ALIGNMENT_MASK
            elif kind in _VALUE_TYPES:
                look.append(one)
            elif kind in (tuple, list) and all(type(each) in _VALUE_TYPES for each in one):
                look.append(tuple(one))
            else:
                return None
    except RuntimeError:  # of a tensor without strides or memory, as a sparse one: the function says what it thinks
        return None
    return tuple(look), addresses


class ReplayCache:
    """The plans of one function, by what its arguments look like."""

    enabled: ClassVar[bool] = os.environ.get("TRITON_INTERPRET") != "1"
    """Kernels that are interpreted have no pointers."""
    device: ClassVar[str] = "cuda"
    """Where kernels run."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Replay | str] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `function(*args, **kwargs)` has for a result.

        By a plan where torch runs eagerly, no gradient is wanted and nobody watches. The function must do what follows
        from its arguments, whatever else the state of the process is.
        """
        if (
            is_compiling()
            or _dispatch_mode_count()
            or _functorch_interpreter() is not None
            or _is_profiler_enabled()
            or not self.enabled
        ):
            return function(*args, **kwargs)
        look = _call_signature(args, kwargs)
        if look is None:
            return function(*args, **kwargs)
        key, addresses = look
        plan = self._known.get(key)
        if type(plan) is Replay:
            if plan.device == torch._C._cuda_getDevice():
                return plan.run(addresses)
        elif plan is _SEEN_ONCE:
            return self._record(key, function, args, kwargs)
        elif plan is None and any(getattr(one, "type", None) == self.device for one in key):
            if len(self._known) >= _MOST_REPLAYS:
                self._known.clear()
            self._known[key] = _SEEN_ONCE
        return function(*args, **kwargs)

    def _record(
        self, key: tuple[Any, ...], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if len({id(one) for one in given}) < len(given):  # whose pointer goes where, does not show
            return function(*args, **kwargs)
        recorded = CallRecorder(given)
        _thread_state.recording = recorded
        try:
            with recorded:
                result = function(*args, **kwargs)
        finally:
            _thread_state.recording = None
        self._known[key] = recorded.plan(result) or _NOT_REPLAYABLE
        return result


class CallRecorder(TorchDispatchMode):
    """Sees what a call does with tensors, and is told of the kernels that it starts."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self._sources = {id(tensor): number for number, tensor in enumerate(given)}
        """Which tensor it is, or is a view of: of those that were given, followed by those allocated."""
        self._roots = list(given)
        self._given = len(given)
        self._kept: list[Any] = []  # as long as they live, no other tensor has their id
        self._allocations: list[Callable[[], Tensor]] = []
        self._launches: list[RecordedLaunch] = []
        self._again = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._kept.append(result)
        allocate = _FACTORIES.get(function)
        if allocate is not None and self._roots and result.device == self._roots[0].device:
            self._sources[id(result)] = len(self._roots)
            self._roots.append(result)
            self._allocations.append(allocate(result))
        elif function.is_view and isinstance(result, Tensor) and _shares_storage(result, args[0]):
            if id(args[0]) in self._sources:
                self._sources[id(result)] = self._sources[id(args[0])]
        else:
            self._again = False
        return result

    def launched(self, start: StartKernel, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """A kernel was started."""
        if any(map(is_tensor_descriptor, args)):  # to be made anew for each call
            self._again = False
            return
        arguments = list(args)
        pointers = []
        for place, one in enumerate(args):
            if isinstance(one, Tensor):
                source = self._sources.get(id(one))
                if source is None:  # kept from another call
                    self._again = False
                    return
                arguments[place] = 0
                if one.numel():  # nothing is nowhere
                    pointers.append((place, source, one.data_ptr() - self._roots[source].data_ptr()))
        self._launches.append(RecordedLaunch(start=start, grid=grid, arguments=arguments, pointers=pointers))

    def found(self, tensor: Tensor, find: Callable[[], Tensor]) -> None:
        """A tensor is used that is kept from other calls, and that calls like this one find by `find`."""
        self._kept.append(tensor)
        self._sources[id(tensor)] = len(self._roots)
        self._roots.append(tensor)
        self._allocations.append(find)

    def plan(self, result: Any) -> Replay | None:
        """How to do the same again, which gave this result; None where more was done than can be told from here."""
        if not self._again or not self._launches:
            return None
        try:
            chosen = self._chosen(result)
        except LookupError:
            return None
        return Replay(
            device=self._roots[0].device.index,
            allocations=tuple(self._allocations),
            launches=tuple(self._launches),
            result=chosen,
        )

    def _chosen(self, result: Any) -> Any:
        """Which of the allocations a result is; it may be an alias, which torch makes of new tensors in a mode."""
        if result is None:
            return None
        if type(result) is tuple:
            return tuple(self._chosen(one) for one in result)
        source = self._sources.get(id(result), -1)
        if source < self._given or _call_signature((result,), {}) != _call_signature((self._roots[source],), {}):
            raise LookupError
        return source - self._given


def _shares_storage(view: Tensor, base: Any) -> bool:
    """Whether it is memory of the other: `reshape` and others of the kind may have copied."""
    return isinstance(base, Tensor) and view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _empty_factory(tensor: Tensor) -> Callable[[], Tensor]:
    size, stride = tuple(tensor.shape), tensor.stride()
    # what compiled code allocates with, on the current device: a third of the time of torch.empty
    direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{tensor.device.type}", None)
    if direct is not None:
        return functools.partial(direct, size, stride, tensor.dtype)
    return functools.partial(torch.empty_strided, size, stride, dtype=tensor.dtype, device=tensor.device)


def _zeros_factory(tensor: Tensor) -> Callable[[], Tensor]:
    return functools.partial(torch.zeros, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)


_aten = torch.ops.aten
_FACTORIES: dict[Any, Callable[[Tensor], Callable[[], Tensor]]] = {
    _aten.empty.memory_format: _empty_factory,
    _aten.empty_like.default: _empty_factory,
    _aten.empty_strided.default: _empty_factory,
    _aten.new_empty.default: _empty_factory,
    _aten.zeros.default: _zeros_factory,
}
