"""Which operator an event is: the overload whose schema takes the inputs that the file shows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from nearpeak.capture.kineto.tensors import Argument, Scalar, Seen, Unknown

_TENSORS = ("List[Tensor]", "List[Optional[Tensor]]")
_ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat")
_NEVER_WRITTEN = ("Device", "Generator", "str", "Stream", "Storage", "QScheme", "Dimname")


class Parameter(NamedTuple):
    """One argument of a schema."""

    name: str
    kind: str
    """"Tensor", "List[Tensor]", "int", "number", "ScalarType", ..., without Optional."""
    optional: bool
    has_default: bool
    default: Any
    keyword_only: bool
    mutated: bool


def parameters(overload: torch._ops.OpOverload[Any, Any]) -> tuple[Parameter, ...]:
    """The arguments of an operator in order."""
    return tuple(_parameter(argument) for argument in overload._schema.arguments)


def _parameter(argument: Any) -> Parameter:
    kind = str(argument.real_type).replace("SymInt", "int")
    optional = kind.startswith("Optional[")
    return Parameter(
        name=argument.name,
        kind=kind[len("Optional[") : -1] if optional else kind,
        optional=optional,
        has_default=argument.has_default_value(),
        default=argument.default_value if argument.has_default_value() else None,
        keyword_only=argument.kwarg_only,
        mutated=argument.alias_info is not None and argument.alias_info.is_write,
    )


def overload_of(name: str, arguments: tuple[Argument, ...]) -> torch._ops.OpOverload[Any, Any] | None:
    """The overload of an event "namespace::operator" that fits its arguments best; None where none fits.

    The profiler writes every argument, defaults too, so the number of them says much. A file of another torch may have
    fewer than the schema here, or more that are absent.
    """
    best: tuple[float, Any] = (0.0, None)
    for overload, wanted in _overloads(name):
        score = _fit(wanted, arguments)
        if score is not None and score > best[0]:
            best = (score, overload)
    return best[1]  # type: ignore[no-any-return]


@functools.cache
def _overloads(name: str) -> tuple[tuple[Any, tuple[Parameter, ...]], ...]:
    namespace, _, operator = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        names = packet.overloads()
    except (AttributeError, RuntimeError):  # torch here has no such operator
        return ()
    found = ((overload, parameters(overload)) for overload in (getattr(packet, item) for item in names))
    return tuple((overload, wanted) for overload, wanted in found if _on_tensors(overload))


def _on_tensors(overload: torch._ops.OpOverload[Any, Any]) -> bool:
    """TorchScript's own overloads share names with those on tensors, and are never recorded."""
    try:
        overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)
    except RuntimeError:  # the dispatcher does not know it
        return False
    schema = overload._schema
    types = [str(item.real_type) for item in (*schema.arguments, *schema.returns)]
    return any("Tensor" in kind for kind in types)


def _fit(wanted: tuple[Parameter, ...], arguments: tuple[Argument, ...]) -> float | None:
    if any(argument is not None for argument in arguments[len(wanted) :]):
        return None
    score = 1.0 - abs(len(wanted) - len(arguments))
    for parameter, argument in zip(wanted, arguments, strict=False):
        points = _fit_one(parameter, argument)
        if points is None:
            return None
        score += points
    if not all(parameter.has_default for parameter in wanted[len(arguments) :]):
        return None
    return max(score, 0.01)


def _fit_one(parameter: Parameter, argument: Argument) -> float | None:
    kind = parameter.kind
    if kind in _NEVER_WRITTEN:
        return 1.0 if argument is None else 0.0 if kind == "str" and not isinstance(argument, Seen) else None
    if argument is None:  # autograd passes tensors that are not there for arguments that ask for one
        if parameter.optional or kind == "List[Optional[Tensor]]":
            return 1.0
        return 0.1 if kind == "Tensor" else None
    if isinstance(argument, Unknown):
        return 0.0
    if isinstance(argument, Seen):
        return 2.0 if kind == "Tensor" else None
    if isinstance(argument, Scalar):
        return _fit_value(kind, argument.value)
    return 2.0 if kind in _TENSORS else None


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
