"""What the user's objects hold, read without running their code.

A class may override how its modules and parameters are listed, or answer any question about an attribute with an error.
Here only the places are read where Python and torch themselves keep attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn


def instance_attributes(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object; None if it has none."""
    if not type(value).__dictoffset__:
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # a class may define `__dict__` as a property, with any code
        return None
    return attributes if isinstance(attributes, dict) else None


def keys_and_values(container: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The keys and the values of a dict of any class, in its order."""
    kind = OrderedDict if issubclass(type(container), OrderedDict) else dict
    return tuple(kind.keys(container)), tuple(kind.values(container))


def submodules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all below it, each once, with their paths, as `named_modules` of torch has them."""
    met: set[int] = set()
    pending = [(prefix, module)]
    while pending:
        path, part = pending.pop()
        if id(part) in met:
            continue
        met.add(id(part))
        yield path, part
        inner = [(name, child) for name, child in _entries(part, "_modules") if issubclass(type(child), nn.Module)]
        pending += [(f"{path}.{name}" if path else str(name), child) for name, child in reversed(inner)]


def named_tensors(
    module: nn.Module, where: Literal["_parameters", "_buffers"], prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters or buffers of a module and all below it, each once; not those of lazy modules without a shape."""
    met: set[int] = set()
    for path, part in submodules(module, prefix):
        for name, tensor in _entries(part, where):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in met and not nn.parameter.is_lazy(tensor):
                met.add(id(tensor))
                yield (f"{path}.{name}" if path else str(name)), tensor


def _entries(module: nn.Module, where: str) -> list[tuple[Any, Any]]:
    container: Any = (instance_attributes(module) or {}).get(where)
    if issubclass(type(container), dict):
        return list(zip(*keys_and_values(container), strict=True))
    items = getattr(container, "items", None)  # modules of TorchScript have lists of their own
    return list(items()) if callable(items) else []
