"""`Forms`: the arguments of a call as plain data, with a key that is the same for all calls of the same form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nearpeak.capture.counted import Counted
from nearpeak.capture.schema import Schema
from nearpeak.capture.values import Seen, Storages, View, dtype_name, setting_name
from nearpeak.work.tensor import Tensor

_SETTINGS = frozenset({torch.dtype, torch.layout, torch.memory_format, torch.device})
_WITH_MORE = frozenset({"complex32", "complex64", "complex128", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
"""Dtypes whose tensors have more than a form: a conjugation, a quantiser."""

_looks: dict[tuple[Any, ...], int] = {}


def look_of(device: torch.device, view: View) -> int:
    """A number for all that a view has beside its storage; the bytes of the storage belong to it."""
    return _looks.setdefault((device, view[1:]), 2 * len(_looks))  # the odd numbers are those that require gradients


class Form(NamedTuple):
    """The form of one call."""

    key: tuple[Any, ...]
    arguments: dict[str, Any]
    """As plain data, by name."""
    tensors: list[FakeTensor]
    plain: list[Tensor]
    """`tensors` as plain data."""
    storages: dict[int, int]
    """Numbered from 0 by their first use."""


NOTE = "nearpeak_note"
"""Where a tensor that was made in a trace has what is known of it, in its `__dict__`: its next op need not ask again.

It is a tuple: an object that stands for the trace, address and bytes of the storage, the number of its look, and the
tensor as plain data. Code can give a tensor another storage, or its storage another size, without an op.
"""

_Draft = tuple[list[Any], list[FakeTensor], list[Tensor], dict[int, int], bool, bool]
"""A form while it is made: parts of the key, tensors, the same as plain data, storages; whether the op writes to its
arguments, and whether it runs in inference mode."""


class Forms:
    """Forms of calls within one trace.

    The same form is: the same shapes, strides, dtypes, devices, and sizes of storages, the same tensors sharing theirs,
    the same other arguments. There is none where an argument has no form, or may have more than its form says: a real
    tensor, a tensor that torch knows the value of, a generator.
    """

    def __init__(self, storages: Storages, mode: FakeTensorMode) -> None:
        self.trace = object()
        self.storages = storages
        self.mode = mode

    def of(self, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        """The form of a call. Ask where torch functions are disabled."""
        inference = _is_inference()
        parts: list[Any] = [schema.name, len(args), _default_dtype(), inference]
        arguments = schema.defaults.copy()
        tensors: list[FakeTensor] = []
        plain: list[Tensor] = []
        storages: dict[int, int] = {}
        draft: _Draft = (parts, tensors, plain, storages, bool(schema.mutated), inference)
        for name, item in zip(schema.arguments, args, strict=False):
            kind = type(item)
            if kind is FakeTensor:
                arguments[name] = self._tensor(item, draft)
            elif kind is int or item is None or kind is str:
                parts.append(item)
                arguments[name] = item
                continue
            else:
                arguments[name] = self._value(item, draft)
            if arguments[name] is NotImplemented:
                return None
        for name, item in kwargs.items():
            parts.append(name)
            arguments[name] = self._value(item, draft)
            if arguments[name] is NotImplemented:
                return None
        form: Form = _new(Form, (tuple(parts), arguments, tensors, plain, storages))
        return form

    def _value(self, value: Any, draft: _Draft) -> Any:
        """A value as plain data, NotImplemented where it has no form."""
        kind = type(value)
        parts = draft[0]
        if kind is int or value is None or kind is str:
            parts.append(value)
            return value
        if kind is float or kind is bool:
            parts.append(kind)  # 1, 1.0 and True are equal
            parts.append(value)
            return value
        if kind is list or kind is tuple:
            parts.append(kind)
            if _INTEGERS.issuperset(map(type, value)):
                parts.append(tuple(value))
                return parts[-1]
            parts.append(len(value))
            items = tuple([self._value(item, draft) for item in value])
            return NotImplemented if any(item is NotImplemented for item in items) else items
        if kind is FakeTensor:
            return self._tensor(value, draft)
        if kind in _SETTINGS:
            parts.append(value)
            return setting_name(value)
        return NotImplemented

    def _tensor(self, tensor: FakeTensor, draft: _Draft) -> Any:
        parts, tensors, plains, local, mutated, inference = draft
        note = tensor.__dict__.get(NOTE)
        if note is not None and note[0] is self.trace and not inference:
            storage = tensor.untyped_storage()
            if storage._cdata == note[1] and storage.nbytes() == note[2]:
                look, plain = note[3], note[4]
                parts.append(look + 1 if tensor.requires_grad else look)
                parts.append(local.setdefault(plain.storage, len(local)))
                tensors.append(tensor)
                plains.append(plain)
                return plain
        if tensor.constant is not None and (mutated or tensor.numel()):
            return NotImplemented
        if tensor.layout is not torch.strided or tensor.fake_mode is not self.mode:
            return NotImplemented
        storage = tensor.untyped_storage()
        view: View = (
            storage._cdata,
            storage.nbytes(),
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),  # type: ignore[assignment]
            tensor.dtype,
            tensor.is_neg(),
        )
        seen = self.storages.views.get(view) or self._first_seen(tensor, view)
        if seen is None:
            return NotImplemented
        look, plain = seen
        parts.append(look + 1 if tensor.requires_grad else look)
        parts.append(local.setdefault(plain.storage, len(local)))
        if inference:
            parts.append(tensor.is_inference())
        if tensor.constant is not None:  # without elements: `torch.tensor([])`, which a list of states begins with
            parts.append("constant")
        tensors.append(tensor)
        plains.append(plain)
        return plain

    def _first_seen(self, tensor: FakeTensor, view: View) -> Seen | None:
        if dtype_name(tensor.dtype) in _WITH_MORE:
            return None
        plain = self.storages.tensor(tensor, "input")
        seen = self.storages.views[view] = (look_of(tensor.fake_device, view), plain)
        return seen


@contextmanager
def _forgetting_views() -> Iterator[None]:
    """`tensor.data = other` changes a tensor without an op: its note is dropped."""
    data: Any = FakeTensor.data

    def assign(tensor: FakeTensor, value: torch.Tensor) -> None:
        forget(tensor)
        data.__set__(tensor, value)

    FakeTensor.data = property(data.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.data


noted = Counted(_forgetting_views)
"""Tensors have notes inside only."""


def forget(value: Any) -> None:
    """Drops the notes of all tensors in a value: an op may have changed their views."""
    if isinstance(value, FakeTensor):
        value.__dict__.pop(NOTE, None)
    elif isinstance(value, (list, tuple)):
        for item in value:
            forget(item)


_INTEGERS = frozenset({int})
_new: Any = tuple.__new__
_is_inference: Any = torch.is_inference_mode_enabled
_default_dtype: Any = torch.get_default_dtype
