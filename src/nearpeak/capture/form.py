"""`Form`: the arguments of a call as plain data, with a key that is the same for all calls of the same form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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


class Form:
    """One call.

    The same form is: the same shapes, strides, dtypes, devices, and sizes of storages, the same tensors sharing theirs,
    the same other arguments. `known` is False where an argument has no form, or may have more than its form says: a
    real tensor, a tensor that torch knows the value of, a generator.
    """

    __slots__ = (
        "_inference",
        "_local",
        "_mode",
        "_mutating",
        "_parts",
        "_storages",
        "arguments",
        "key",
        "known",
        "plain",
        "tensors",
    )

    def __init__(
        self, storages: Storages, mode: FakeTensorMode, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.known = True
        self.tensors: list[FakeTensor] = []
        self.plain: list[Tensor] = []
        """`tensors` as plain data."""
        self._storages = storages
        self._mode = mode
        self._local: dict[int, int] = {}
        self._mutating = bool(schema.mutated)
        self._inference = torch.is_inference_mode_enabled()
        parts = self._parts = [schema.name, len(args), torch.get_default_dtype(), self._inference]
        arguments = self.arguments = schema.defaults.copy()
        tensor, value = self._tensor, self._value
        for name, item in zip(schema.arguments, args, strict=False):
            arguments[name] = tensor(item) if type(item) is FakeTensor else value(item)
            if not self.known:
                return
        for name, item in kwargs.items():
            parts.append(name)
            arguments[name] = value(item)
        self.key = tuple(parts)

    def _value(self, value: Any) -> Any:
        kind = type(value)
        parts = self._parts
        if kind is int or value is None or kind is str:
            parts.append(value)
            return value
        if kind is float or kind is bool:
            parts.append(kind)  # 1, 1.0 and True are equal
            parts.append(value)
            return value
        if kind is list or kind is tuple:
            parts.append(kind)
            parts.append(len(value))
            return tuple([self._value(item) for item in value])
        if kind is FakeTensor:
            return self._tensor(value)
        if kind in _SETTINGS:
            parts.append(value)
            return setting_name(value)
        self.known = False
        return None

    def _tensor(self, tensor: FakeTensor) -> Tensor | None:
        if tensor.constant is not None and (self._mutating or tensor.numel()):
            self.known = False
            return None
        if tensor.layout is not torch.strided or tensor.fake_mode is not self._mode:
            self.known = False
            return None
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
        seen = self._storages.views.get(view)
        if seen is None:
            seen = self._first_seen(tensor, view)
            if seen is None:
                return None
        look, plain = seen
        parts, local = self._parts, self._local
        parts.append(look + 1 if tensor.requires_grad else look)
        parts.append(local.setdefault(plain.storage, len(local)))
        if self._inference:
            parts.append(tensor.is_inference())
        if tensor.constant is not None:  # without elements: `torch.tensor([])`, which a list of states begins with
            parts.append("constant")
        self.tensors.append(tensor)
        self.plain.append(plain)
        return plain

    def _first_seen(self, tensor: FakeTensor, view: View) -> Seen | None:
        if dtype_name(tensor.dtype) in _WITH_MORE:
            self.known = False
            return None
        plain = self._storages.tensor(tensor, "input")
        seen = self._storages.views[view] = (look_of(tensor.fake_device, view), plain)
        return seen
