"""`Alike`: which ops of a trace do the same to other storages, so that what follows from that is found once.

A model runs the same ops in every layer. Its cost, its touches, its tiles follow from the name, the arguments and the
flags of an op, and its storages only give the names: see `nearpeak.ops.cost.Formula`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class OpClasses:
    """The ops of a trace by kind: two ops of one kind differ in nothing but their place and their storages."""

    kinds: tuple[int, ...]
    """Of each op, numbered from 0 in the order of their first ops."""
    storages: tuple[tuple[int, ...], ...]
    """Of each op. Ops of one kind use theirs in the same way, place by place."""
    firsts: tuple[int, ...]
    """The first op of each kind."""
    found: tuple[dict[str, Any], ...]
    """Room for what is found out about each kind. It may be there in the next trace, or not."""


def classify_ops(ops: Iterable[Op]) -> OpClasses:
    """The kinds of ops."""
    known: dict[Any, int] = {}
    kinds: list[int] = []
    used: list[tuple[int, ...]] = []
    firsts: list[int] = []
    found: list[dict[str, Any]] = []
    for index, op in enumerate(ops):
        note = getattr(op, "form", None)
        if note is None:
            key, storages = _key(op)
        else:
            form, storages = note
            flags = (op.tf32_products, op.tf32_convolutions)
            key = (form, flags)
        try:
            kind = known.get(key)
        except TypeError:  # an argument that cannot be looked up
            kind, key = None, index
        if kind is None:
            kind = known[key] = len(firsts)
            firsts.append(index)
            found.append({} if note is None else form.found.setdefault(flags, {}))
        kinds.append(kind)
        used.append(storages)
    return OpClasses(tuple(kinds), tuple(used), tuple(firsts), tuple(found))


def _key(op: Op) -> tuple[Any, tuple[int, ...]]:
    storages: dict[int, int] = {}
    form: list[Any] = [op.name, op.mutated, op.tf32_products, op.tf32_convolutions, *op.arguments]
    for value in op.arguments.values():
        _form(value, form, storages)
    form.append(None)
    for tensor in op.outputs:
        _form(tensor, form, storages)
    return tuple(form), tuple(storages)


def _form(value: Any, form: list[Any], storages: dict[int, int]) -> None:
    """Adds what a formula can see of a value, with the storages numbered from 0 by their first use."""
    kind = type(value)
    if kind is Tensor:
        number = storages.setdefault(value.storage, len(storages))
        form.append((value.shape, value.strides, value.dtype, value.offset, number))
    elif kind is tuple or kind is list:
        form.append(len(value))
        for item in value:
            _form(item, form, storages)
    else:
        form.append(kind)  # 1, 1.0 and True are equal
        form.append(value)
