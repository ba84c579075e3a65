"""Ops of an optimizer on lists of all parameters, remembered row by row: parameters of one shape have the same form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.capture import remembered
from nearpeak.capture.form import Form, Forms
from nearpeak.capture.remembered import Recipe
from nearpeak.capture.schema import Schema

Row = tuple[Form, Recipe]


_known: dict[tuple[Any, ...], Recipe] = {}
"""By what the key of a form has for a row and for the arguments that all rows share."""


def rows_of(
    operator: Callable[..., Any],
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    form: Form,
    forms: Forms,
) -> list[Row] | None:
    """How the results of each row are made, asking torch for rows of a new form; None where they do not follow."""
    lists = [len(item) for item in args if type(item) is list]
    if not lists or len(set(lists)) > 1 or any(type(item) in (list, tuple) for item in kwargs.values()):
        return None
    if len(_known) >= remembered.MOST_FORMS or not remembered.recipes:
        _known.clear()
    keys = _keys(args, form, lists[0])
    rows: list[Row] = []
    for index in range(lists[0]):
        recipe = _known.get(keys[index]) if keys else None
        if recipe is not None:
            tensors, plain = form.tensors[index :: lists[0]], form.plain[index :: lists[0]]
            rows.append((Form((), {}, tensors, plain, {}), recipe))
            continue
        row = tuple([[item[index]] if type(item) is list else item for item in args])
        alone = forms.of(schema, row, kwargs)
        if alone is None:
            return None
        if alone.key not in remembered.recipes:
            result = operator(*row, **kwargs)
            with torch._C._DisableTorchDispatch():
                remembered.learn(alone.key, forms.mode, alone.tensors, result)
        recipe = remembered.recipes.get(alone.key)
        if recipe is None or len(recipe.items) != 1:
            return None
        if keys:
            _known[keys[index]] = recipe
        rows.append((alone, recipe))
    return rows


def _keys(args: Sequence[Any], form: Form, count: int) -> list[tuple[Any, ...]]:
    """What decides over each row; nothing where that is not as simple as in most optimizers.

    It is simple where all tensors stand in lists and have storages of their own, and have two parts of the key each.
    """
    parts = form.key
    if len(form.storages) < len(form.tensors) or parts[3]:
        return []
    columns: list[Any] = []
    shared: list[Any] = []
    at = 4
    for item in args:
        if type(item) is not list:
            if isinstance(item, torch.Tensor) or type(item) is tuple:
                return []
            width = 2 if type(item) in (float, bool) else 1
            shared += parts[at : at + width]
            at += width
            continue
        width = 2 * count
        if parts[at] is not list or parts[at + 1] != count or {type(value) for value in item} not in _SIMPLE:
            return []
        columns.append(parts[at + 2 : at + 2 + width : 2])
        if type(item[0]) is float:
            columns.append(parts[at + 3 : at + 3 + width : 2])
        elif any(value.constant is not None for value in item):
            return []
        at += 2 + width
    return list(zip(repeat((*parts[:4], *shared, *parts[at:]), count), *columns, strict=True))


_SIMPLE = ({FakeTensor}, {float})
