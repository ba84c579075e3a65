"""What an operator returns for the inputs that a file shows, found by running it on tensors without data."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nearpeak.capture.kineto.schemas import Parameter, overload_of, parameters
from nearpeak.capture.kineto.tensors import Argument, Members, Scalar, Seen, Unknown
from nearpeak.capture.schema import is_taken_apart

_QUERIES = ("aten::result_type", "aten::is_same_size", "aten::is_pinned", "aten::can_cast", "aten::lift_fresh")
"""Operators that ask about tensors and touch no data; `lift_fresh` is how `torch.tensor` hands over its data."""
_CODES: dict[str, tuple[Any, ...]] = {
    "ScalarType": (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32),
        *(torch.bfloat16, torch.quint4x2, torch.quint2x4, None, None, None, None, None),
        *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
        *(torch.uint16, torch.uint32, torch.uint64),
    ),
    "Layout": (torch.strided,),
    "MemoryFormat": (*(torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),),
}
"""What the numbers of enumerations stand for, in the order of c10's headers."""


class Result(NamedTuple):
    """One tensor that an operator returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    memory: int
    """Whose memory it has: that of the operator's tensor with this number, in order of the arguments; a number beyond
    them is memory of its own."""
    bytes: int
    """Of all of that memory, where it is its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """One overload, and what is asked of it again and again. There is one object for each."""

    name: str
    overload: Any
    parameters: tuple[Parameter, ...]
    composite: bool
    """It is taken apart before autograd: the ops inside are what runs."""
    query: bool

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that it writes."""
        return tuple(parameter.name for parameter in self.parameters if parameter.mutated)


@functools.cache
def _operator(overload: Any, event: str) -> Operator:
    return Operator(
        name=str(overload),
        overload=overload,
        parameters=parameters(overload),
        composite=is_taken_apart(overload),
        query=event in _QUERIES or event.startswith(("prim::", "profiler::")),
    )


@functools.lru_cache(maxsize=65536)
def operator_of(event: str, arguments: tuple[Argument, ...]) -> Operator | None:
    """The operator of an event "aten::mm"; None where torch here has none that takes these arguments."""
    overload = overload_of(event, arguments)
    return None if overload is None else _operator(overload, event)


def is_number(parameter: Parameter, argument: Argument) -> bool:
    """Whether a tensor is really a number of the user's: `x * 2.0` is recorded with a double of no dimensions."""
    return (
        isinstance(argument, Seen)
        and not argument.shape
        and parameter.name == "other"
        and argument.dtype in ("float64", "int64", "bool", "complex128")
    )


@functools.lru_cache(maxsize=65536)
def results_of(operator: Operator, arguments: tuple[Argument, ...]) -> tuple[Result, ...] | None:
    """What the operator returns; None where that depends on values or on what the file does not show."""
    if any(isinstance(argument, Unknown) for argument in arguments):
        return None
    if not any("Tensor" in str(item.real_type) for item in operator.overload._schema.returns):
        return ()
    with _quiet(), torch.no_grad():
        try:
            return _run(operator, arguments, "meta")
        except Exception:  # anything may come out of an operator that has no such kernel: the other way follows
            pass
        try:
            with FakeTensorMode():
                return _run(operator, arguments, "cpu")
        except Exception:  # the same: what cannot run without data is not modelled, and is counted by the caller
            return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and messages of an operator that is only asked for its shapes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def _run(operator: Operator, arguments: tuple[Argument, ...], device: str) -> tuple[Result, ...]:
    tensors: list[torch.Tensor] = []
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for place, parameter in enumerate(operator.parameters):
        given = place < len(arguments)
        argument = arguments[place] if given else None
        if not given and not parameter.keyword_only:
            break
        unsaid = argument is None and parameter.has_default  # a string, say, which is never written
        value = parameter.default if unsaid else _value(parameter, argument, tensors, device)
        if parameter.kind == "Device" and not tensors:
            value = torch.device(device)  # a factory
        if parameter.keyword_only:
            named[parameter.name] = value
        else:
            positional.append(value)
    returned = operator.overload(*positional, **named)
    memory = {tensor.untyped_storage()._cdata: place for place, tensor in reversed([*enumerate(tensors)])}
    found = []
    for tensor in _flat(returned):
        storage = tensor.untyped_storage()
        place = memory.setdefault(storage._cdata, len(memory))
        found.append(
            Result(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                dtype_name(tensor.dtype),
                int(tensor.storage_offset()),
                place,
                storage.nbytes(),
            )
        )
    return tuple(found)


def _value(parameter: Parameter, argument: Argument, tensors: list[torch.Tensor], device: str) -> Any:
    if isinstance(argument, Seen):
        if is_number(parameter, argument):
            return {"float64": 1.0, "complex128": 1j, "bool": True}.get(str(argument.dtype), 1)
        return _tensor(argument, tensors, device)
    if isinstance(argument, Scalar):
        return constant(parameter.kind, argument.value)
    if isinstance(argument, Members):
        return [_tensor(member, tensors, device) for member in argument.tensors]
    if parameter.kind == "Tensor" and not parameter.optional:
        return torch.empty(0, device=device)  # none was passed, which a call from Python cannot do
    return None


def constant(kind: str, value: Any) -> Any:
    """A scalar argument as torch takes it: 15 as a ScalarType is bfloat16."""
    codes = _CODES.get(kind)
    if codes is not None:
        if not 0 <= value < len(codes):
            raise ValueError(f"{value} is no {kind}")
        return codes[value]
    if kind == "float" and isinstance(value, int):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _tensor(seen: Seen, tensors: list[torch.Tensor], device: str) -> torch.Tensor:
    if seen.dtype is None:
        raise ValueError("a tensor without a dtype")
    tensor = torch.empty_strided(seen.shape, seen.strides, dtype=getattr(torch, seen.dtype), device=device)
    tensors.append(tensor)
    return tensor


def tensors_of(operator: Operator, arguments: Sequence[Argument]) -> Iterator[tuple[Parameter, Seen]]:
    """The tensors among the arguments with their parameters, in the order in which `Result.memory` numbers them."""
    for parameter, argument in zip(operator.parameters, arguments, strict=False):
        if isinstance(argument, Seen):
            if not is_number(parameter, argument):
                yield parameter, argument
        elif isinstance(argument, Members):
            for member in argument.tensors:
                yield parameter, member


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
