"""Memoized results of ops on fake tensors: a call with the same signature has the same result.

torch derives the shapes, strides and dtypes of every result anew, which takes several times as long as everything
else in a trace. Most ops of a model ran before, in another layer, on tensors of the same shapes, strides and dtypes.
So the result of a call is stored by its `CallSignature`: each result is either an argument itself (`SameTensor`), or
a view of an argument's storage or a tensor with a new storage (`NewTensor`).

A recipe is stored only if it was replayed next to torch's own result and gave the same in everything that the next op
could see. Where it did not, and wherever results depend on values, torch is asked each time. Ops on lists of tensors,
as those of optimizers, are memoized row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nearpeak.ops.fast_init import positional_constructor
from nearpeak.ops.op import OpSignature
from nearpeak.ops.tensor import Tensor
from nearpeak.trace.patches.shared_patch import SharedPatch
from nearpeak.trace.schema import OperatorSchema
from nearpeak.trace.storages import KnownView, Storages, View, dtype_name, setting_name

_SETTINGS = frozenset({torch.dtype, torch.layout, torch.memory_format, torch.device})
_DTYPES_WITH_EXTRA_STATE = frozenset(
    {"complex32", "complex64", "complex128", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
)
"""Dtypes whose tensors have state that is no part of a signature: a conjugation, a quantizer."""

_layout_ids: dict[tuple[Any, ...], int] = {}


def layout_id(device: torch.device, view: View) -> int:
    """A number for the layout of a view: its device, the bytes of its storage, shape, strides, offset and dtype.

    Numbers are even; the odd number after each is the same layout with `requires_grad`.
    """
    return _layout_ids.setdefault((device, view[1:]), 2 * len(_layout_ids))


class CallSignature(NamedTuple):
    """Everything about a call that its results can depend on, values of tensors excepted; `key` is hashable."""

    key: tuple[Any, ...]
    arguments: dict[str, Any]
    """As plain data, by name."""
    tensors: list[FakeTensor]
    plain: list[Tensor]
    """`tensors` as plain data."""
    storages: dict[int, int]
    """Numbered from 0 by their first use."""


TENSOR_NOTE = "nearpeak_note"
"""The entry in the `__dict__` of a tensor made in a trace that saves its next op from looking it up.

It is a tuple: an object that stands for the trace, the address and the bytes of the storage, the layout id, and the
tensor as plain data. Address and bytes are compared, since code can give a tensor another storage, or its storage
another size, without an op.
"""

_Draft = tuple[list[Any], list[FakeTensor], list[Tensor], dict[int, int], bool, bool]
"""An unfinished signature: parts of the key, tensors, tensors as plain data, storages; whether the op writes to its
arguments, and whether it runs in inference mode."""


class CallSignatures:
    """Signatures of the calls within one trace.

    Two calls have the same signature if shapes, strides, dtypes, devices and sizes of storages are the same, the same
    tensors share storages, and the other arguments are equal. A call has none if an argument carries more than that: a
    real tensor, a tensor whose value torch knows, a generator.
    """

    def __init__(self, storages: Storages, mode: FakeTensorMode) -> None:
        self.trace = object()
        self.storages = storages
        self.mode = mode

    def sign(self, schema: OperatorSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallSignature | None:
        """The signature of a call; None if it has none. Call it where torch functions are disabled."""
        inference = _inference_mode_enabled()
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
        signature: CallSignature = _new_tuple(CallSignature, (tuple(parts), arguments, tensors, plain, storages))
        return signature

    def _value(self, value: Any, draft: _Draft) -> Any:
        """A value as plain data; NotImplemented if it has no place in a signature."""
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
        note = tensor.__dict__.get(TENSOR_NOTE)
        if note is not None and note[0] is self.trace and not inference:
            storage = tensor.untyped_storage()
            if storage._cdata == note[1] and storage.nbytes() == note[2]:
                layout, plain = note[3], note[4]
                parts.append(layout + 1 if tensor.requires_grad else layout)
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
        known = self.storages.views.get(view) or self._first_seen(tensor, view)
        if known is None:
            return NotImplemented
        layout, plain = known
        parts.append(layout + 1 if tensor.requires_grad else layout)
        parts.append(local.setdefault(plain.storage, len(local)))
        if inference:
            parts.append(tensor.is_inference())
        if tensor.constant is not None:  # without elements: `torch.tensor([])`, which a list of states begins with
            parts.append("constant")
        tensors.append(tensor)
        plains.append(plain)
        return plain

    def _first_seen(self, tensor: FakeTensor, view: View) -> KnownView | None:
        if dtype_name(tensor.dtype) in _DTYPES_WITH_EXTRA_STATE:
            return None
        plain = self.storages.tensor(tensor, "input")
        known = self.storages.views[view] = (layout_id(tensor.fake_device, view), plain)
        return known


@SharedPatch
@contextmanager
def tensor_notes() -> Iterator[None]:
    """Inside, tensors can have notes: `tensor.data = other`, which changes a tensor without an op, drops its note."""
    data: Any = FakeTensor.data

    def assign(tensor: FakeTensor, value: torch.Tensor) -> None:
        drop_notes(tensor)
        data.__set__(tensor, value)

    FakeTensor.data = property(data.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.data


def drop_notes(value: Any) -> None:
    """Drops the notes of all tensors in a value: an op may have changed their views."""
    if isinstance(value, FakeTensor):
        value.__dict__.pop(TENSOR_NOTE, None)
    elif isinstance(value, (list, tuple)):
        for item in value:
            drop_notes(item)


_INTEGERS = frozenset({int})
_new_tuple: Any = tuple.__new__
_inference_mode_enabled: Any = torch.is_inference_mode_enabled
_default_dtype: Any = torch.get_default_dtype

MAX_TENSORS = 64
"""An op on more tensors is an optimizer's, which runs once per step, and is not memoized."""
MAX_SIGNATURES = 100_000
"""Signatures after which the memo is cleared, so that a long session does not grow without end."""

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class SameTensor:
    """A result that is one of the tensors among the arguments."""

    argument: int


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A result that is a view of an argument's storage, or has a new storage."""

    argument: int
    """The index of the tensor whose storage it views; -1 for a new storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    dtype_name: str
    offset: int
    device: torch.device
    attributes: dict[str, Any]
    """The `__dict__` of the Python object."""
    layout: int
    view: tuple[Any, ...]
    """The view without the address of its storage."""

    def make(self, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> FakeTensor:
        """The result. Call it where dispatch and torch functions are disabled."""
        if self.argument < 0:
            memory = _empty(self.shape, self.strides, dtype=self.dtype, device=_META)
        else:
            memory = _scratch_tensors[self.dtype]
            memory.set_(tensors[self.argument].untyped_storage(), self.offset, self.shape, self.strides)
        tensor = _make_subclass(FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=self.device)
        _forbid_data(tensor)
        attributes = tensor.__dict__ = self.attributes.copy()
        attributes["fake_mode"] = mode
        return tensor  # type: ignore[no-any-return]


class Recipe(NamedTuple):
    """How the results of an op are made."""

    container: type | None
    """list or tuple; None for a result row_signature."""
    items: tuple[NewTensor | SameTensor | int | None, ...]
    """Tensors, and values that follow from the signature."""
    op_signature: OpSignature
    makes_tensors: bool


recipes: dict[Any, Recipe | None] = {}
"""The memo, by the key of a signature; None where torch has to be asked."""
row_op_signatures: dict[Any, OpSignature] = {}
"""By the key of a signature whose rows are memoized one by one."""
_scratch_tensors: dict[torch.dtype, Any] = {}
"""Tensors to set to a storage, by dtype. The result of a replay is a copy that shares the storage."""
_empty: Any = torch.empty_strided
_make_subclass: Any = torch.Tensor._make_subclass
_forbid_data: Any = torch._C._set_throw_on_mutable_data_ptr


def can_memoize(mode: FakeTensorMode | None) -> bool:
    """Whether results of a fake mode can be memoized: not with symbolic shapes, nor with real values beside."""
    return (
        mode is not None
        and mode.shape_env is None
        and bool(getattr(mode, "cache_enabled", True))
        and not getattr(mode, "propagate_real_tensors", False)
    )


def memoize(key: Any, mode: FakeTensorMode, tensors: Sequence[FakeTensor], result: Any) -> None:
    """Stores a recipe that makes `result` from the tensors among the arguments, if a replay gives the same."""
    if len(tensors) > MAX_TENSORS:
        return
    if len(recipes) >= MAX_SIGNATURES:
        recipes.clear()
        row_op_signatures.clear()
    recipes[key] = None
    container = type(result) if type(result) in (tuple, list) else None
    items = (result,) if container is None else result
    descriptions = [_describe_result(item, tensors) for item in items]
    if any(described is NotImplemented for described in descriptions):
        return
    new_storages = [
        item.untyped_storage()._cdata
        for item, described in zip(items, descriptions, strict=True)
        if _has_own_storage(described)
    ]
    if len(set(new_storages)) < len(new_storages):  # results that share a new storage
        return
    for item, described in zip(items, descriptions, strict=True):
        if isinstance(described, NewTensor) and not _equivalent(described.make(mode, tensors), item):
            return
    recipes[key] = Recipe(
        container,
        tuple(descriptions),
        OpSignature(),
        any(isinstance(described, NewTensor) for described in descriptions),
    )


def replay(
    signature: CallSignature, recipe: Recipe, signatures: CallSignatures, results: list[Any], outputs: list[Tensor]
) -> None:
    """Makes the results of a memoized call: adds them to `results` and, as plain data, to `outputs`.

    New storages are added to the signature. Call it where torch functions are disabled, and dispatch as well if the
    recipe makes tensors.
    """
    tensors, plain = signature.tensors, signature.plain
    for item in recipe.items:
        if type(item) is NewTensor:
            result = item.make(signatures.mode, tensors)
            storage = result.untyped_storage()
            size = item.view[0]
            if item.argument >= 0:
                number = plain[item.argument].storage
            else:
                number = signatures.storages.new(storage, size)
                signature.storages[number] = len(signature.storages)
            output = _make_tensor(item.shape, item.strides, item.dtype_name, number, item.offset, None)
            result.__dict__[TENSOR_NOTE] = (signatures.trace, storage._cdata, size, item.layout, output)
            results.append(result)
            outputs.append(output)
        elif type(item) is SameTensor:
            results.append(tensors[item.argument])
            outputs.append(plain[item.argument])
        else:
            results.append(item)


_make_tensor = positional_constructor(Tensor)


def constant_tensor(mode: FakeTensorMode, value: torch.Tensor) -> FakeTensor:
    """A fake tensor of one element or none that keeps its value."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        constant = value.clone()
        tensor = FakeTensor(mode, memory, value.device, constant=constant)
        converter = mode.fake_tensor_converter
        converter.add_constant_storage_mapping(tensor)
        converter.set_tensor_memo(constant, tensor)  # an op in place gives it back, and a view shares its storage
        meta = converter.meta_converter
        meta.storage_memo[meta.describer.get_storage_id(constant.untyped_storage())] = memory.untyped_storage()
    return tensor


def constant_values(args: Sequence[Any]) -> list[Any] | None:
    """Arguments with all tensors replaced by their values; None if a tensor has no value, or there is no tensor."""
    values_by_argument: list[Any] = []
    tensors = 0
    for argument in args:
        items = argument if type(argument) is list else [argument]
        fakes = [item for item in items if isinstance(item, torch.Tensor)]
        if any(type(item) is not FakeTensor or item.constant is None for item in fakes):
            return None
        tensors += len(fakes)
        values = [item.constant if type(item) is FakeTensor else item for item in items]
        values_by_argument.append(values if type(argument) is list else values[0])
    return values_by_argument if tensors else None


def _has_own_storage(item: Any) -> bool:
    return isinstance(item, NewTensor) and item.argument < 0


def _describe_result(item: Any, tensors: Sequence[FakeTensor]) -> Any:
    """How a result is made; NotImplemented where it cannot be."""
    if item is None or type(item) is int:
        return item
    if type(item) is not FakeTensor or item.layout is not torch.strided or item.constant is not None:
        return NotImplemented
    for index, tensor in enumerate(tensors):
        if item is tensor:
            return SameTensor(index)
    device = item.fake_device
    attributes = dict(item.__dict__)
    mode = attributes.pop("fake_mode")
    if any(value is not None and value is not device for value in attributes.values()):
        return NotImplemented
    storage = item.untyped_storage()
    shared = (index for index, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata)
    offset: Any = item.storage_offset()
    view = (storage.nbytes(), item.shape, item.stride(), offset, item.dtype, item.is_neg())
    if item.dtype not in _scratch_tensors:
        _scratch_tensors[item.dtype] = torch.empty(0, dtype=item.dtype, device=_META)
    return NewTensor(
        argument=next(shared, -1),
        shape=tuple(item.shape),
        strides=item.stride(),
        dtype=item.dtype,
        dtype_name=dtype_name(item.dtype),
        offset=offset,
        device=device,
        attributes={**attributes, "fake_mode": mode},
        layout=layout_id(device, (0, *view)),
        view=view,
    )


def _equivalent(a: FakeTensor, b: FakeTensor) -> bool:
    return _visible_state(a) == _visible_state(b) and torch._C._dispatch_key_set(a) == torch._C._dispatch_key_set(b)


def _visible_state(tensor: FakeTensor) -> tuple[Any, ...]:
    """Everything that an op can see of a tensor."""
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.layout, tensor.fake_device),
        *(tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_inference()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.__dict__),
    )


RowSignature = tuple[CallSignature, Recipe]

_row_recipes: dict[tuple[Any, ...], Recipe] = {}
"""By the parts of a signature's key that belong to one row or to the arguments that all rows share."""


def memoized_rows(
    operator: Callable[..., Any],
    schema: OperatorSchema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: CallSignature,
    signatures: CallSignatures,
) -> list[RowSignature] | None:
    """The recipe of each row of an op on lists; rows with a new signature are run by torch and memoized.

    None where results do not follow row by row.
    """
    lists = [len(item) for item in args if type(item) is list]
    if not lists or len(set(lists)) > 1 or any(type(item) in (list, tuple) for item in kwargs.values()):
        return None
    if len(_row_recipes) >= MAX_SIGNATURES or not recipes:
        _row_recipes.clear()
    keys = _row_keys(args, signature, lists[0])
    rows: list[RowSignature] = []
    for index in range(lists[0]):
        recipe = _row_recipes.get(keys[index]) if keys else None
        if recipe is not None:
            tensors, plain = signature.tensors[index :: lists[0]], signature.plain[index :: lists[0]]
            rows.append((CallSignature((), {}, tensors, plain, {}), recipe))
            continue
        row = tuple([[item[index]] if type(item) is list else item for item in args])
        row_signature = signatures.sign(schema, row, kwargs)
        if row_signature is None:
            return None
        if row_signature.key not in recipes:
            result = operator(*row, **kwargs)
            with torch._C._DisableTorchDispatch():
                memoize(row_signature.key, signatures.mode, row_signature.tensors, result)
        recipe = recipes.get(row_signature.key)
        if recipe is None or len(recipe.items) != 1:
            return None
        if keys:
            _row_recipes[keys[index]] = recipe
        rows.append((row_signature, recipe))
    return rows


def _row_keys(args: Sequence[Any], signature: CallSignature, count: int) -> list[tuple[Any, ...]]:
    """The key of each row; empty where rows are not as simple as in most optimizers.

    Rows are simple if all tensors are in lists and have storages of their own: each has two parts of the key.
    """
    parts = signature.key
    if len(signature.storages) < len(signature.tensors) or parts[3]:
        return []
    columns: list[Any] = []
    shared: list[Any] = []
    position = 4
    for item in args:
        if type(item) is not list:
            if isinstance(item, torch.Tensor) or type(item) is tuple:
                return []
            width = 2 if type(item) in (float, bool) else 1
            shared += parts[position : position + width]
            position += width
            continue
        width = 2 * count
        if (
            parts[position] is not list
            or parts[position + 1] != count
            or {type(value) for value in item} not in _SIMPLE_ROW_TYPES
        ):
            return []
        columns.append(parts[position + 2 : position + 2 + width : 2])
        if type(item[0]) is float:
            columns.append(parts[position + 3 : position + 3 + width : 2])
        elif any(value.constant is not None for value in item):
            return []
        position += 2 + width
    return list(zip(repeat((*parts[:4], *shared, *parts[position:]), count), *columns, strict=True))


_SIMPLE_ROW_TYPES = ({FakeTensor}, {float})
