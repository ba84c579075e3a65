"""Results of ops on fake tensors, made again without asking torch: an op on arguments of the same form has the same.

torch derives shapes, strides and dtypes of every result anew, which takes several times as long as everything else
that a trace does. Most ops of a model ran before, in another layer, on tensors of the same shapes, strides and dtypes
with the same numbers beside them. A result is then one of three: an argument itself, a view of an argument's storage,
or a tensor with a storage of its own.

What is remembered was made once in this way next to torch's own result and compared with it in everything that the
next op could see. Where they differ, and wherever results depend on values, torch is asked each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nearpeak.capture.form import NOTE, Form, Forms, look_of
from nearpeak.capture.values import dtype_name
from nearpeak.work.op import OpForm
from nearpeak.work.quick import maker
from nearpeak.work.tensor import Tensor

MOST_TENSORS = 64
"""An op on more tensors is an optimizer's: it runs once in a step."""
MOST_FORMS = 100_000
"""Forms after which everything is forgotten, so that a long session does not grow without end."""

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Given:
    """A result that is one of the tensors among the arguments."""

    argument: int


@dataclass(frozen=True, slots=True)
class Made:
    """A result that is a view of an argument's storage, or has a storage of its own."""

    argument: int
    """The tensor whose storage it views; -1 for a storage of its own."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    dtype_name: str
    offset: int
    device: torch.device
    attributes: dict[str, Any]
    """Those of the Python object."""
    look: int
    view: tuple[Any, ...]
    """The view without the address of its storage, and the number of its look: as its next op will ask for them."""

    def make(self, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> FakeTensor:
        """The result. Call it where dispatch and torch functions are disabled."""
        if self.argument < 0:
            memory = _empty(self.shape, self.strides, dtype=self.dtype, device=_META)
        else:
            memory = _scratch[self.dtype]
            memory.set_(tensors[self.argument].untyped_storage(), self.offset, self.shape, self.strides)
        tensor = _make_subclass(FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=self.device)
        _forbid_data(tensor)
        attributes = tensor.__dict__ = self.attributes.copy()
        attributes["fake_mode"] = mode
        return tensor  # type: ignore[no-any-return]


class Recipe(NamedTuple):
    """How the results of an op are made."""

    container: type | None
    """list or tuple; None for a result alone."""
    items: tuple[Made | Given | int | None, ...]
    """Tensors, and values that follow from the form."""
    form: OpForm
    makes: bool
    """Whether a tensor is made."""


recipes: dict[Any, Recipe | None] = {}
"""By the key of a form; None where torch has to be asked."""
forms_of_rows: dict[Any, OpForm] = {}
"""By the key of a form of which the rows are remembered, and not the whole."""
_scratch: dict[torch.dtype, Any] = {}
"""Tensors to set to a storage. The result is a copy that shares it."""
_empty: Any = torch.empty_strided
_make_subclass: Any = torch.Tensor._make_subclass
_forbid_data: Any = torch._C._set_throw_on_mutable_data_ptr


def remembers(mode: FakeTensorMode | None) -> bool:
    """Whether the results of a fake mode can be remembered: not with symbolic shapes, nor with real values beside."""
    return (
        mode is not None
        and mode.shape_env is None
        and bool(getattr(mode, "cache_enabled", True))
        and not getattr(mode, "propagate_real_tensors", False)
    )


def learn(form: Any, mode: FakeTensorMode, tensors: Sequence[FakeTensor], result: Any) -> None:
    """Remembers how to make `result` from the tensors among the arguments, if that gives the same."""
    if len(tensors) > MOST_TENSORS:
        return
    if len(recipes) >= MOST_FORMS:
        recipes.clear()
        forms_of_rows.clear()
    recipes[form] = None
    container = type(result) if type(result) in (tuple, list) else None
    items = (result,) if container is None else result
    made = [_how(item, tensors) for item in items]
    if any(how is NotImplemented for how in made):
        return
    own = [item.untyped_storage()._cdata for item, how in zip(items, made, strict=True) if _has_own(how)]
    if len(set(own)) < len(own):  # results that share a new storage
        return
    for item, how in zip(items, made, strict=True):
        if isinstance(how, Made) and not _same(how.make(mode, tensors), item):
            return
    recipes[form] = Recipe(container, tuple(made), OpForm(), any(isinstance(how, Made) for how in made))


def make(form: Form, recipe: Recipe, forms: Forms, results: list[Any], outputs: list[Tensor]) -> None:
    """Adds the results of a known form, the same as plain data, and to the form the storages that it makes.

    Call it where torch functions are disabled, and dispatch as well if the recipe makes tensors.
    """
    tensors, plain = form.tensors, form.plain
    for how in recipe.items:
        if type(how) is Made:
            result = how.make(forms.mode, tensors)
            storage = result.untyped_storage()
            size = how.view[0]
            if how.argument >= 0:
                number = plain[how.argument].storage
            else:
                number = forms.storages.new(storage, size)
                form.storages[number] = len(form.storages)
            output = _make_tensor(how.shape, how.strides, how.dtype_name, number, how.offset)
            result.__dict__[NOTE] = (forms.trace, storage._cdata, size, how.look, output)
            results.append(result)
            outputs.append(output)
        elif type(how) is Given:
            results.append(tensors[how.argument])
            outputs.append(plain[how.argument])
        else:
            results.append(how)


_make_tensor = maker(Tensor)


def constant(mode: FakeTensorMode, value: torch.Tensor) -> FakeTensor:
    """A fake tensor of one element or none that keeps its value."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        kept = value.clone()
        tensor = FakeTensor(mode, memory, value.device, constant=kept)
        converter = mode.fake_tensor_converter
        converter.add_constant_storage_mapping(tensor)
        converter.set_tensor_memo(kept, tensor)  # an op in place gives it back, and a view shares its storage
        meta = converter.meta_converter
        meta.storage_memo[meta.describer.get_storage_id(kept.untyped_storage())] = memory.untyped_storage()
    return tensor


def values_of(args: Sequence[Any]) -> list[Any] | None:
    """Arguments with all tensors replaced by their values; None where there are tensors without, or none at all."""
    found: list[Any] = []
    tensors = 0
    for argument in args:
        items = argument if type(argument) is list else [argument]
        fakes = [item for item in items if isinstance(item, torch.Tensor)]
        if any(type(item) is not FakeTensor or item.constant is None for item in fakes):
            return None
        tensors += len(fakes)
        values = [item.constant if type(item) is FakeTensor else item for item in items]
        found.append(values if type(argument) is list else values[0])
    return found if tensors else None


def _has_own(how: Any) -> bool:
    return isinstance(how, Made) and how.argument < 0


def _how(item: Any, tensors: Sequence[FakeTensor]) -> Any:
    """How an item is made; NotImplemented where it cannot be."""
    if item is None or type(item) is int:
        return item
    if type(item) is not FakeTensor or item.layout is not torch.strided or item.constant is not None:
        return NotImplemented
    for index, tensor in enumerate(tensors):
        if item is tensor:
            return Given(index)
    device = item.fake_device
    attributes = dict(item.__dict__)
    mode = attributes.pop("fake_mode")
    if any(value is not None and value is not device for value in attributes.values()):
        return NotImplemented
    storage = item.untyped_storage()
    shared = (index for index, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata)
    offset: Any = item.storage_offset()
    view = (storage.nbytes(), item.shape, item.stride(), offset, item.dtype, item.is_neg())
    if item.dtype not in _scratch:
        _scratch[item.dtype] = torch.empty(0, dtype=item.dtype, device=_META)
    return Made(
        argument=next(shared, -1),
        shape=tuple(item.shape),
        strides=item.stride(),
        dtype=item.dtype,
        dtype_name=dtype_name(item.dtype),
        offset=offset,
        device=device,
        attributes={**attributes, "fake_mode": mode},
        look=look_of(device, (0, *view)),
        view=view,
    )


def _same(a: FakeTensor, b: FakeTensor) -> bool:
    return _seen(a) == _seen(b) and torch._C._dispatch_key_set(a) == torch._C._dispatch_key_set(b)


def _seen(tensor: FakeTensor) -> tuple[Any, ...]:
    """All that an op could see of a tensor."""
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.layout, tensor.fake_device),
        *(tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_inference()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.__dict__),
    )
