"""`OpClasses`: the ops of a trace by kind, so that what follows from the kind is computed once (memoized).

A model runs the same ops in every layer. The cost of an op, its reads and writes and its tiles follow from its name,
its arguments and its flags; storages only give the numbers: see `nearpeak.ops.cost.Formula`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nearpeak.ops.op import Op, OpSignature
from nearpeak.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class OpClasses:
    """The kinds of the ops of a trace. Two ops of one kind differ only in their position and their storages."""

    kinds: tuple[int, ...]
    """The kind of each op, numbered in the order of the first ops."""
    storages: tuple[tuple[int, ...], ...]
    """The storages of each op. Ops of one kind use theirs in the same way, place by place."""
    firsts: tuple[int, ...]
    """The first op of each kind."""
    memos: tuple[dict[str, Any], ...]
    """Memoized facts of each kind, such as its cost. They may be shared with other traces."""


def classify_ops(ops: Iterable[Op]) -> OpClasses:
    """The kinds of these ops. An op keeps its signature, so that it is made once."""
    known: dict[Any, int] = {}
    signatures: dict[Any, OpSignature] = {}
    kinds: list[int] = []
    used: list[tuple[int, ...]] = []
    firsts: list[int] = []
    memos: list[dict[str, Any]] = []
    for index, op in enumerate(ops):
        signature = getattr(op, "form", None)
        if signature is None:
            content, storages = _content(op)
            try:
                form = signatures.setdefault(content, OpSignature())
            except TypeError:  # an argument that cannot be looked up
                form = OpSignature()
            object.__setattr__(op, "form", (form, storages))
        else:
            form, storages = signature
        flags = (op.tf32_products, op.tf32_convolutions)
        key = (form, flags)
        kind = known.get(key)
        if kind is None:
            kind = known[key] = len(firsts)
            firsts.append(index)
            memos.append(form.memos.setdefault(flags, {}))
        kinds.append(kind)
        used.append(storages)
    return OpClasses(tuple(kinds), tuple(used), tuple(firsts), tuple(memos))


def _content(op: Op) -> tuple[Any, tuple[int, ...]]:
    storages: dict[int, int] = {}
    form: list[Any] = [op.name, op.mutated, *op.arguments]
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
