"""The arguments of a recorded op, from the profiler's strings to shapes, dtypes and plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nearpeak.trace.kineto.recording import Inputs

DTYPES: dict[str, str] = {
    "float": "float32",
    "double": "float64",
    "c10::half": "float16",
    "c10::bfloat16": "bfloat16",
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "short int": "int16",
    "unsigned short": "uint16",
    "short unsigned int": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    "long long int": "int64",
    "__int64": "int64",
    "unsigned long": "uint64",
    "long unsigned int": "uint64",
    "unsigned long long": "uint64",
    "c10::complex<c10::half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::float8_e4m3fn": "float8_e4m3fn",
    "c10::float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::float8_e5m2": "float8_e5m2",
    "c10::float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::float8_e8m0fnu": "float8_e8m0fnu",
    "c10::float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "c10::qint8": "qint8",
    "c10::quint8": "quint8",
    "c10::qint32": "qint32",
}
"""torch's dtype names by the C++ types that the profiler writes, in small letters; compilers spell them differently."""


_LARGEST_SIZE = 2**50
"""Elements of a tensor, and a step between two."""
_MOST_DIMENSIONS = 64
_LARGEST_INTEGER = 2**63


class Unknown:
    """The type of `UNKNOWN`: an argument that the file does not show."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()


class RecordedTensor(NamedTuple):
    """A tensor in the file. `dtype` is None for members of a list, for which the profiler writes none."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None


class TensorList(NamedTuple):
    """A list of tensors."""

    tensors: tuple[RecordedTensor, ...]


class Scalar(NamedTuple):
    """A number, a bool, or a list of them; an enumeration such as a dtype is its number.

    >>> Scalar(1) == Scalar(True), 1 == True  # they choose different overloads
    (False, True)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scalar) and repr(self.value) == repr(other.value)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(repr(self.value))


Argument = RecordedTensor | TensorList | Scalar | Unknown | None
"""One argument. None is an absent one, or one of a type that is never written: a device, a string, a generator."""


def parse_arguments(inputs: Inputs) -> tuple[Argument, ...]:
    """The arguments in the order of the operator's schema.

    >>> parse_arguments(Inputs([[2, 3], []], [[3, 1], []], ["c10::BFloat16", "Scalar"], ["", "-1"]))
    (RecordedTensor(shape=(2, 3), strides=(3, 1), dtype='bfloat16'), Scalar(value=-1))
    """
    types = inputs.types if isinstance(inputs.types, list) else []
    lists = [bool(_item_or_none(inputs.dims, place)) for place, name in enumerate(types) if name == "TensorList"]
    return tuple(
        _parse_argument(
            str(name or ""),
            _item_or_none(inputs.dims, place),
            _item_or_none(inputs.strides, place),
            _item_or_none(inputs.values, place),
            any(lists),
        )
        for place, name in enumerate(types)
    )


def _parse_argument(name: str, dims: Any, strides: Any, value: Any, other_lists: bool) -> Argument:
    if name in ("TensorList", "GenericList"):
        return _parse_tensor_list(dims, strides, other_lists)
    if name in ("Scalar", "ScalarList"):
        return _parse_scalar(value)
    dtype = DTYPES.get(name.lower())
    if dtype is not None:
        tensor = _parse_tensor(dims, strides, dtype)
        return UNKNOWN if tensor is None else tensor
    return UNKNOWN if name else None


def _parse_tensor_list(dims: Any, strides: Any, other_lists: bool) -> Argument:
    """The members of a list. No shapes mean an empty list beside lists with members, else a long list was omitted."""
    if not isinstance(dims, list) or (not dims and not other_lists):
        return UNKNOWN
    members = [_parse_tensor(shape, _item_or_none(strides, place), None) for place, shape in enumerate(dims)]
    tensors = tuple(member for member in members if member is not None)
    return TensorList(tensors) if len(tensors) == len(members) else UNKNOWN


def _parse_tensor(dims: Any, strides: Any, dtype: str | None) -> RecordedTensor | None:
    shape = _parse_integers(dims)
    if shape is None:
        return None
    steps = _parse_integers(strides)
    if steps is None or len(steps) != len(shape):
        steps = contiguous_strides(shape)  # files before torch 2.0 have no strides
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    if len(shape) > _MOST_DIMENSIONS or math.prod(shape) >= _LARGEST_SIZE or last >= _LARGEST_SIZE:
        return None  # no memory holds it
    return RecordedTensor(shape, steps, dtype)


def _parse_scalar(value: Any) -> Argument:
    """A concrete input, which is text: "15", "1.", "1e-05", "False", "[4, 2048]", "inf"."""
    if not isinstance(value, str):
        return UNKNOWN if value is None or isinstance(value, (list, dict)) or _is_too_large(value) else Scalar(value)
    text = value.strip()
    if not text:
        return UNKNOWN
    if text.startswith("[") and text.endswith("]"):
        items = [_parse_number(item.strip()) for item in text[1:-1].split(",") if item.strip()]
        return UNKNOWN if any(item is None or _is_too_large(item) for item in items) else Scalar(tuple(items))
    number = _parse_number(text)
    return UNKNOWN if number is None or _is_too_large(number) else Scalar(number)


def _is_too_large(value: float) -> bool:
    """Whether it is an integer that torch cannot have."""
    return isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER


def _parse_number(text: str) -> int | float | bool | None:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _parse_integers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < _LARGEST_SIZE for item in value):
        return None
    return tuple(value)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _item_or_none(items: Any, place: int) -> Any:
    return items[place] if isinstance(items, list) and place < len(items) else None
