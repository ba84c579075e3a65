"""The operator of a recorded event, and what it returns.

`find_operator`: the overload whose schema takes the inputs that the file shows. `infer_results`: what it returns for
them, found by running it on tensors without data.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nearpeak.trace.kineto.arguments import Argument, RecordedTensor, Scalar, TensorList, Unknown
from nearpeak.trace.patches.shared_patch import no_warnings
from nearpeak.trace.schema import is_composite
from nearpeak.trace.storages import dtype_name

_TENSOR_LISTS = ("List[Tensor]", "List[Optional[Tensor]]")
_ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat")
_UNRECORDED_KINDS = ("Device", "Generator", "str", "Stream", "Storage", "QScheme", "Dimname")


class SchemaParameter(NamedTuple):
    """One argument of a schema."""

    name: str
    kind: str
    """"Tensor", "List[Tensor]", "int", "number", "ScalarType", ..., without Optional."""
    optional: bool
    has_default: bool
    default: Any
    keyword_only: bool
    mutated: bool


def schema_parameters(overload: torch._ops.OpOverload[Any, Any]) -> tuple[SchemaParameter, ...]:
    """The arguments of an operator in order."""
    return tuple(_schema_parameter(argument) for argument in overload._schema.arguments)


def _schema_parameter(argument: Any) -> SchemaParameter:
    kind = str(argument.real_type).replace("SymInt", "int")
    optional = kind.startswith("Optional[")
    return SchemaParameter(
        name=argument.name,
        kind=kind[len("Optional[") : -1] if optional else kind,
        optional=optional,
        has_default=argument.has_default_value(),
        default=argument.default_value if argument.has_default_value() else None,
        keyword_only=argument.kwarg_only,
        mutated=argument.alias_info is not None and argument.alias_info.is_write,
    )


def find_overload(name: str, arguments: tuple[Argument, ...]) -> torch._ops.OpOverload[Any, Any] | None:
    """The overload of an event "namespace::operator" that fits its arguments best; None if none fits.

    The profiler writes every argument, defaults too, so their number says much. A file of another torch may have fewer
    than the schema of this one, or more that are absent.
    """
    best: tuple[float, Any] = (0.0, None)
    for overload, parameters in _overloads(name):
        score = _fit_score(parameters, arguments)
        if score is not None and score > best[0]:
            best = (score, overload)
    return best[1]  # type: ignore[no-any-return]


@functools.cache
def _overloads(name: str) -> tuple[tuple[Any, tuple[SchemaParameter, ...]], ...]:
    namespace, _, operator = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # this torch has none, or it is no name of one
        return ()
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    names = packet.overloads()
    candidates = ((overload, schema_parameters(overload)) for overload in (getattr(packet, item) for item in names))
    return tuple((overload, parameters) for overload, parameters in candidates if _takes_tensors(overload))


def _takes_tensors(overload: torch._ops.OpOverload[Any, Any]) -> bool:
    """Whether it is no overload of TorchScript's, which share names with those on tensors and are never recorded."""
    try:
        overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)
    except RuntimeError:  # the dispatcher does not know it
        return False
    schema = overload._schema
    types = [str(item.real_type) for item in (*schema.arguments, *schema.returns)]
    return any("Tensor" in kind for kind in types)


def _fit_score(parameters: tuple[SchemaParameter, ...], arguments: tuple[Argument, ...]) -> float | None:
    if any(argument is not None for argument in arguments[len(parameters) :]):
        return None
    score = 1.0 - abs(len(parameters) - len(arguments))
    for parameter, argument in zip(parameters, arguments, strict=False):
        points = _fit_argument(parameter, argument)
        if points is None:
            return None
        score += points
    if not all(parameter.has_default for parameter in parameters[len(arguments) :]):
        return None
    return max(score, 0.01)


def _fit_argument(parameter: SchemaParameter, argument: Argument) -> float | None:
    kind = parameter.kind
    if kind in _UNRECORDED_KINDS:
        return 1.0 if argument is None else 0.0 if kind == "str" and not isinstance(argument, RecordedTensor) else None
    if argument is None:  # autograd passes tensors that are not there for arguments that ask for one
        if parameter.optional or kind == "List[Optional[Tensor]]":
            return 1.0
        return 0.1 if kind == "Tensor" else None
    if isinstance(argument, Unknown):
        return 0.0
    if isinstance(argument, RecordedTensor):
        return 2.0 if kind == "Tensor" else None
    if isinstance(argument, Scalar):
        return _fit_value(kind, argument.value)
    return 2.0 if kind in _TENSOR_LISTS else None


def _fit_value(kind: str, value: Any) -> float | None:
    if isinstance(value, tuple):
        if kind not in ("List[int]", "List[float]", "List[bool]", "List[number]"):
            return None
        return 2.0 if kind != "List[int]" or all(isinstance(item, int) for item in value) else None
    if kind == "number":
        return 1.5
    if isinstance(value, bool):
        return 2.0 if kind == "bool" else None
    if kind == "float":
        return 2.0 if isinstance(value, float) else 1.0
    if isinstance(value, int) and (kind == "int" or kind in _ENUMERATIONS):
        return 2.0
    return None


_MOST_RESULTS = 2**16
_MOST_REAL_ELEMENTS = 2**24
_QUERIES = ("aten::result_type", "aten::is_same_size", "aten::is_pinned", "aten::can_cast", "aten::lift_fresh")
"""Operators that query tensors and touch no data; `torch.tensor` passes its data through `lift_fresh`."""
_ENUMERATION_VALUES: dict[str, tuple[Any, ...]] = {
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
"""The values of enumerations by number, in the order of c10's headers."""


class OperatorResult(NamedTuple):
    """One tensor that an operator returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    memory: int
    """The number of the argument tensor whose storage it views; a number beyond them is a new storage."""
    bytes: int
    """Of the whole storage, if it is new."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedOperator:
    """One overload of an operator; there is one object for each."""

    name: str
    overload: Any
    parameters: tuple[SchemaParameter, ...]
    composite: bool
    """It is decomposed before autograd: the ops inside are what runs."""
    query: bool

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that it writes."""
        return tuple(parameter.name for parameter in self.parameters if parameter.mutated)


@functools.cache
def _build_operator(overload: Any, event: str) -> RecordedOperator:
    return RecordedOperator(
        name=str(overload),
        overload=overload,
        parameters=schema_parameters(overload),
        composite=is_composite(overload),
        query=event in _QUERIES or event.startswith(("prim::", "profiler::")),
    )


@functools.lru_cache(maxsize=65536)
def find_operator(event: str, arguments: tuple[Argument, ...]) -> RecordedOperator | None:
    """The operator of an event "aten::mm"; None if this torch has none that takes these arguments."""
    overload = find_overload(event, arguments)
    return None if overload is None else _build_operator(overload, event)


def is_python_number(parameter: SchemaParameter, argument: Argument) -> bool:
    """Whether a tensor is a Python number: `x * 2.0` is recorded with a zero-dimensional double."""
    return (
        isinstance(argument, RecordedTensor)
        and not argument.shape
        and parameter.name == "other"
        and argument.dtype in ("float64", "int64", "bool", "complex128")
    )


@functools.lru_cache(maxsize=65536)
def infer_results(operator: RecordedOperator, arguments: tuple[Argument, ...]) -> tuple[OperatorResult, ...] | None:
    """What the operator returns; None if that depends on values or on what the file does not show."""
    if any(isinstance(argument, Unknown) for argument in arguments):
        return None
    if not any("Tensor" in str(item.real_type) for item in operator.overload._schema.returns):
        return ()
    if _most_results(operator, arguments) > _MOST_RESULTS:
        return None
    # without a meta kernel, an operator would run on real tensors of zeros
    elements = sum(math.prod(tensor.shape) for _, tensor in tensor_arguments(operator, arguments))
    with _no_warnings(), torch.no_grad():
        try:
            return _run_on_fake_tensors(operator, arguments, "meta")
        except Exception:  # an operator without a meta kernel may raise anything
            pass
        try:
            with FakeTensorMode(allow_fallback_kernels=elements <= _MOST_REAL_ELEMENTS):
                return _run_on_fake_tensors(operator, arguments, "cpu")
        except Exception:  # the same; the caller counts what is not modeled
            return None


def _most_results(operator: RecordedOperator, arguments: tuple[Argument, ...]) -> int:
    """The most tensors that it can return: one that splits a tensor returns as many as a dimension has places."""
    if not any("List" in str(item.real_type) for item in operator.overload._schema.returns):
        return 1
    largest = max((size for _, tensor in tensor_arguments(operator, arguments) for size in tensor.shape), default=1)
    for parameter, argument in zip(operator.parameters, arguments, strict=False):
        if isinstance(argument, Scalar) and isinstance(argument.value, int):
            if parameter.name == "split_size":
                return -(-largest // max(1, argument.value))
            if parameter.name in ("chunks", "sections"):
                return max(1, argument.value)
        if isinstance(argument, Scalar) and isinstance(argument.value, tuple):
            return len(argument.value) + 1
    members = sum(len(argument.tensors) for argument in arguments if isinstance(argument, TensorList))
    return members or largest


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Inside, operators that run for their shapes alone give no warnings and no log messages."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with no_warnings():
            yield
    finally:
        logger.disabled = before


def _run_on_fake_tensors(
    operator: RecordedOperator, arguments: tuple[Argument, ...], device: str
) -> tuple[OperatorResult, ...]:
    tensors: list[torch.Tensor] = []
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for place, parameter in enumerate(operator.parameters):
        recorded = place < len(arguments)
        argument = arguments[place] if recorded else None
        if not recorded and not parameter.keyword_only:
            break
        unsaid = argument is None and parameter.has_default  # such as a string, which is never written
        value = parameter.default if unsaid else _as_torch_argument(parameter, argument, tensors, device)
        if parameter.kind == "Device" and not tensors:
            value = torch.device(device)  # a factory
        if parameter.keyword_only:
            named[parameter.name] = value
        else:
            positional.append(value)
    returned = operator.overload(*positional, **named)
    memory = {tensor.untyped_storage()._cdata: place for place, tensor in reversed([*enumerate(tensors)])}
    results = []
    for tensor in _flat_tensors(returned):
        storage = tensor.untyped_storage()
        place = memory.setdefault(storage._cdata, len(memory))
        results.append(
            OperatorResult(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                dtype_name(tensor.dtype),
                int(tensor.storage_offset()),
                place,
                storage.nbytes(),
            )
        )
    return tuple(results)


def _as_torch_argument(parameter: SchemaParameter, argument: Argument, tensors: list[torch.Tensor], device: str) -> Any:
    if isinstance(argument, RecordedTensor):
        if is_python_number(parameter, argument):
            return {"float64": 1.0, "complex128": 1j, "bool": True}.get(str(argument.dtype), 1)
        return _empty_tensor(argument, tensors, device)
    if isinstance(argument, Scalar):
        return as_torch_value(parameter.kind, argument.value)
    if isinstance(argument, TensorList):
        return [_empty_tensor(member, tensors, device) for member in argument.tensors]
    if parameter.kind == "Tensor" and not parameter.optional:
        return torch.empty(0, device=device)  # C++ passed an undefined tensor, which Python cannot
    return None


def as_torch_value(kind: str, value: Any) -> Any:
    """A scalar argument as torch takes it: 15 as a ScalarType is bfloat16."""
    codes = _ENUMERATION_VALUES.get(kind)
    if codes is not None:
        if not 0 <= value < len(codes):
            raise ValueError(f"{value} is no {kind}")
        return codes[value]
    if kind == "float" and isinstance(value, int):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _empty_tensor(recorded: RecordedTensor, tensors: list[torch.Tensor], device: str) -> torch.Tensor:
    if recorded.dtype is None:
        raise ValueError("a tensor without a dtype")
    tensor = torch.empty_strided(recorded.shape, recorded.strides, dtype=getattr(torch, recorded.dtype), device=device)
    tensors.append(tensor)
    return tensor


def tensor_arguments(
    operator: RecordedOperator, arguments: Sequence[Argument]
) -> Iterator[tuple[SchemaParameter, RecordedTensor]]:
    """The tensors among the arguments with their parameters, in the order of `OperatorResult.memory`."""
    for parameter, argument in zip(operator.parameters, arguments, strict=False):
        if isinstance(argument, RecordedTensor):
            if not is_python_number(parameter, argument):
                yield parameter, argument
        elif isinstance(argument, TensorList):
            for member in argument.tensors:
                yield parameter, member


def _flat_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat_tensors(item)
