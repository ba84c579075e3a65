"""Ops of an optimizer on lists of all parameters, remembered row by row: parameters of one shape have the same form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nearpeak.capture import remembered
from nearpeak.capture.form import Form
from nearpeak.capture.remembered import Recipe
from nearpeak.capture.schema import Schema
from nearpeak.capture.values import Storages

Row = tuple[Form, Recipe]


def rows_of(
    operator: Callable[..., Any],
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    storages: Storages,
    mode: FakeTensorMode,
) -> list[Row] | None:
    """How the results of each row are made, asking torch for rows of a new form; None where they do not follow."""
    lists = [len(item) for item in args if type(item) is list]
    if not lists or len(set(lists)) > 1 or any(type(item) in (list, tuple) for item in kwargs.values()):
        return None
    rows: list[Row] = []
    for index in range(lists[0]):
        row = tuple([[item[index]] if type(item) is list else item for item in args])
        form = Form(storages, mode, schema, row, kwargs)
        if not form.known:
            return None
        if form.key not in remembered.recipes:
            result = operator(*row, **kwargs)
            with torch._C._DisableTorchDispatch():
                remembered.learn(form.key, mode, form.tensors, result)
        recipe = remembered.recipes.get(form.key)
        if recipe is None or len(recipe.items) != 1:
            return None
        rows.append((form, recipe))
    return rows
