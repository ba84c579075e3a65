"""Replays of recorded calls: allocate, launch, return, with nothing left to decide.

Shapes, strides, dtypes, alignment and options of the arguments determine what a function of this package does. Deciding
takes several times as long as a launch. The second call with the same signature is therefore recorded: the tensors that
it allocates and the kernels that it launches. Later calls with this signature replay that. A call that does anything
else, such as copying a tensor first, is never replayed. Where a function of torch does the same as a call that chose
torch's backend, later calls are calls of that function.
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
"""The tensor types that are memory, and nothing else."""
_VALUE_TYPES = frozenset((int, float, bool, str, type(None), torch.dtype))
"""The types of arguments that are compared by value."""
_MOST_REPLAYS = 4096
"""The cache of a function is cleared at this size: some shapes never come again."""
_ALIGNMENT_MASK = 15
"""Kernels are specialized for pointers to multiples of 16 bytes, and no further."""
_SEEN_ONCE, _NOT_REPLAYABLE = "once", "never"
"""The states of signatures without a replay."""

_is_grad_enabled = torch.is_grad_enabled
_dispatch_mode_count = torch._C._len_torch_dispatch_stack
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_is_profiler_enabled = torch._C._autograd._profiler_enabled

FindNative = Callable[..., Callable[..., Any] | None]
"""The function of torch that does the same as a call with these arguments by torch's backend, or None."""
StartKernel = Callable[[tuple[int, int, int], int, Sequence[Any]], None]
"""Starts a kernel, by its grid, the stream and the arguments, with pointers in place of tensors."""


class _ThreadState(threading.local):
    recording: CallRecorder | None = None


_thread_state = _ThreadState()


def active_recording() -> CallRecorder | None:
    """The recorder of the call in progress on this thread, to be told of launches."""
    return _thread_state.recording


def is_observed() -> bool:
    """Whether something observes operators: a dispatch mode, a transform such as vmap, or a profiler."""
    own = 0 if _thread_state.recording is None else 1
    return bool(_dispatch_mode_count() > own or _functorch_interpreter() is not None or _is_profiler_enabled())


def is_tensor_descriptor(argument: Any) -> bool:
    """Whether a kernel argument is a TMA descriptor, which contains the address of its tensor."""
    return isinstance(getattr(argument, "base", None), Tensor)


class RecordedLaunch(NamedTuple):
    """A kernel to start."""

    start: StartKernel
    grid: tuple[int, int, int]
    arguments: list[Any]
    pointers: list[tuple[int, int, int]]
    """For each pointer: its place among the arguments, the number of its tensor, and the offset in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What calls with one signature do."""

    device: int
    allocations: tuple[Callable[[], Tensor], ...]
    launches: tuple[RecordedLaunch, ...]
    result: Any
    """The number of the allocation that is returned, None, or a tuple of these."""

    def run(self, addresses: list[int]) -> Any:
        """Makes a call on the current device, with the arguments' tensors at these addresses."""
        tensors = []
        for allocate in self.allocations:
            tensor = allocate()
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for start, grid, template, pointers in self.launches:
            arguments = template.copy()
            for place, source, offset in pointers:
                arguments[place] = addresses[source] + offset
            start(grid, stream, arguments)
        result = self.result
        return tensors[result] if type(result) is int else _select_results(result, tensors)


def _select_results(result: Any, tensors: list[Tensor]) -> Any:
    if isinstance(result, tuple):
        return tuple(_select_results(element, tensors) for element in result)
    return None if result is None else tensors[result]


def _call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[int]] | None:
    """The signature of a call, and the addresses of its tensors; None if it cannot be replayed."""
    is_differentiable = _is_grad_enabled()
    signature: list[Any] = []
    addresses: list[int] = []
    try:
        for argument in (*args, *kwargs.values(), tuple(kwargs)) if kwargs else args:
            kind = type(argument)
            if kind in PLAIN_TENSORS:
                if is_differentiable and argument.requires_grad:
                    return None
                address = argument.data_ptr()
                addresses.append(address)
                signature += (
                    argument.shape, argument.stride(), argument.dtype, argument.device, address & _ALIGNMENT_MASK
                )  # fmt: skip
            elif kind in _VALUE_TYPES:
                signature.append(argument)
            elif kind in (tuple, list) and all(type(element) in _VALUE_TYPES for element in argument):
                signature.append(tuple(argument))
            else:
                return None
    except RuntimeError:  # of a tensor without strides or memory, such as a sparse one: the function will say so
        return None
    return tuple(signature), addresses


class ReplayCache:
    """The replays of one function, by the signature of its calls.

    Args:
        native: Finds the function of torch to call in place of one that chose torch's backend.
        replays: Whether other calls are replayed.
    """

    enabled: ClassVar[bool] = os.environ.get("TRITON_INTERPRET") != "1"
    """Interpreted kernels have no pointers."""
    device: ClassVar[str] = "cuda"
    """The device type that kernels run on."""

    def __init__(self, native: FindNative | None = None, *, replays: bool = True) -> None:
        self._native, self._replays = native, replays
        self._known: dict[tuple[Any, ...], Replay | Callable[..., Any] | str] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, replayed if torch runs eagerly, no gradient is needed and nothing observes it.

        What the function does must follow from its arguments alone, whatever the state of the process.
        """
        if (
            is_compiling()
            or _dispatch_mode_count()
            or _functorch_interpreter() is not None
            or _is_profiler_enabled()
            or not self.enabled
        ):
            return function(*args, **kwargs)
        signature = _call_signature(args, kwargs)
        if signature is None:
            return function(*args, **kwargs)
        key, addresses = signature
        replay = self._known.get(key)
        if type(replay) is Replay:
            if replay.device == torch._C._cuda_getDevice():
                return replay.run(addresses)
        elif replay is _SEEN_ONCE:
            return self._record(key, function, args, kwargs)
        elif callable(replay):
            return replay(*args, **kwargs)
        elif replay is None and any(getattr(element, "type", None) == self.device for element in key):
            if len(self._known) >= _MOST_REPLAYS:
                self._known.clear()
            self._known[key] = _SEEN_ONCE
        return function(*args, **kwargs)

    def _record(
        self, key: tuple[Any, ...], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        if len({id(tensor) for tensor in tensors}) < len(tensors):  # ambiguous: which argument a pointer belongs to
            return function(*args, **kwargs)
        recorder = CallRecorder(tensors)
        _thread_state.recording = recorder
        try:
            with recorder:
                result = function(*args, **kwargs)
        finally:
            _thread_state.recording = None
        replay: Replay | Callable[..., Any] | None = recorder.replay(result) if self._replays else None
        if replay is None and self._native is not None and recorder.backends == {"torch"}:
            replay = self._native(*args, **kwargs)
        self._known[key] = replay or _NOT_REPLAYABLE
        return result


class CallRecorder(TorchDispatchMode):
    """Observes what a call does with tensors, and is told of the kernels that it launches."""

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()
        self._sources = {id(tensor): number for number, tensor in enumerate(arguments)}
        """By id, the number of the tensor that it is or views: of the arguments, followed by the allocations."""
        self._roots = list(arguments)
        self._argument_count = len(arguments)
        self._references: list[Any] = []  # while these live, no other tensor has their id
        self._allocations: list[Callable[[], Tensor]] = []
        self._launches: list[RecordedLaunch] = []
        self._is_replayable = True
        self.backends: set[str] = set()
        """What the operations of the call chose."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._references.append(result)
        factory = _FACTORIES.get(function)
        if factory is not None and self._roots and result.device == self._roots[0].device:
            self._add_root(result, factory(result))
        elif function.is_view and isinstance(result, Tensor) and _shares_storage(result, args[0]):
            if id(args[0]) in self._sources:
                self._sources[id(result)] = self._sources[id(args[0])]
        else:
            self._is_replayable = False
        return result

    def add_launch(self, start: StartKernel, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Records that a kernel was launched."""
        if any(map(is_tensor_descriptor, args)):  # has to be made anew for each call
            self._is_replayable = False
            return
        arguments = list(args)
        pointers = []
        for place, argument in enumerate(args):
            if isinstance(argument, Tensor):
                source = self._sources.get(id(argument))
                if source is None:  # kept from another call
                    self._is_replayable = False
                    return
                arguments[place] = 0
                if argument.numel():  # else it has no address
                    pointers.append((place, source, argument.data_ptr() - self._roots[source].data_ptr()))
        self._launches.append(RecordedLaunch(start=start, grid=grid, arguments=arguments, pointers=pointers))

    def add_shared_tensor(self, tensor: Tensor, get: Callable[[], Tensor]) -> None:
        """Records the use of a tensor that calls share, and that replays obtain by `get`."""
        self._references.append(tensor)
        self._add_root(tensor, get)

    def _add_root(self, tensor: Tensor, allocate: Callable[[], Tensor]) -> None:
        self._sources[id(tensor)] = len(self._roots)
        self._roots.append(tensor)
        self._allocations.append(allocate)

    def replay(self, result: Any) -> Replay | None:
        """The replay of the call, which returned `result`; None if the call did more than can be replayed."""
        if not self._is_replayable or not self._launches:
            return None
        try:
            allocation = self._result_allocation(result)
        except LookupError:
            return None
        return Replay(
            device=self._roots[0].device.index,
            allocations=tuple(self._allocations),
            launches=tuple(self._launches),
            result=allocation,
        )

    def _result_allocation(self, result: Any) -> Any:
        """The number of the allocation that a result is, or aliases: torch aliases new tensors in a mode."""
        if result is None:
            return None
        if type(result) is tuple:
            return tuple(self._result_allocation(element) for element in result)
        source = self._sources.get(id(result), -1)
        if source < self._argument_count or _call_signature((result,), {}) != _call_signature(
            (self._roots[source],), {}
        ):
            raise LookupError
        return source - self._argument_count


def _shares_storage(view: Tensor, base: Any) -> bool:
    """Whether a view is memory of its base: `reshape` and similar operators may copy."""
    return isinstance(base, Tensor) and view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _empty_factory(tensor: Tensor) -> Callable[[], Tensor]:
    size, stride = tuple(tensor.shape), tensor.stride()
    # the allocator of compiled code, for the current device: a third of the time of torch.empty
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
