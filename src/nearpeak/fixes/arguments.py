"""`ArgumentState`: the objects among the arguments of a call that the call may change, such as a cache of keys.

A model is run many times on the batch of one call while it is fixed. What a run changes in objects that the program
goes on with is put back: attributes and items get the same objects again, and tensors the same values.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MOST_OBJECTS = 20_000
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size, type(None))
_SHARED = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, torch.Generator)
"""Are no state of a call."""
_CONTAINERS = (dict, list, tuple, OrderedDict, defaultdict)


def is_plain(value: Any) -> bool:
    """Whether a value cannot change."""
    return isinstance(value, _PLAIN)


def leaves_of(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments; an object of a class of its own is one, whatever is registered for it."""
    return pytree.tree_flatten(tree, is_leaf=lambda value: type(value) not in _CONTAINERS)


class ArgumentState:
    """What the objects among some arguments hold now. Empty where all arguments are tensors and plain values."""

    def __init__(self, args: Any, kwargs: Any, *, values: bool = True) -> None:
        """`values` copies the values of tensors too, so that they can be restored."""
        self._contents: list[tuple[str, Any, Any]] = []
        """A path, a dictionary or list, and a copy of it."""
        self.tensors: list[tuple[str, Tensor]] = []
        self._seen: set[int] = set()
        for leaf in leaves_of((args, kwargs))[0]:
            if not isinstance(leaf, Tensor):
                self._follow(type(leaf).__name__, leaf)
        self._copies = [tensor.detach().clone() for _, tensor in self.tensors] if values else []
        self._shapes = [(tensor.shape, tensor.data_ptr()) for _, tensor in self.tensors]

    def __bool__(self) -> bool:
        return bool(self._contents)

    def _follow(self, path: str, value: Any) -> None:
        if is_plain(value) or isinstance(value, _SHARED) or id(value) in self._seen or len(self._seen) > MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((path, value))
        elif isinstance(value, (tuple, set, frozenset)):
            for place, item in enumerate(value):
                self._follow(f"{path}[{place}]", item)
        elif isinstance(value, (dict, list)):
            self._contents.append((path, value, value.copy()))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                self._follow(f"{path}[{key}]", item)
        if hasattr(value, "__dict__"):
            self._contents.append((path, vars(value), dict(vars(value))))
            for name, item in list(vars(value).items()):
                self._follow(f"{path}.{name}", item)

    def restore(self) -> None:
        """Puts everything back, in place."""
        for _, container, content in self._contents:
            if isinstance(container, dict):
                container.clear()
                container.update(content)
            else:
                container[:] = content
        with torch.no_grad():
            for (_, tensor), copy in zip(self.tensors, self._copies, strict=True):
                tensor.copy_(copy)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """At the end, also by an error, everything is put back."""
        try:
            yield
        finally:
            self.restore()

    def changes(self) -> str:
        """The first thing that is other than it was in Python, as a clause; "" if nothing is.

        Values of tensors do not count: a call that is replayed changes them again.
        """
        for path, container, content in self._contents:
            now, before = (dict(enumerate(each)) if isinstance(each, list) else each for each in (container, content))
            for key in dict.fromkeys([*before, *now]):
                if not _is_same(now.get(key, before), before.get(key, now)):
                    name = f"{path}[{key}]" if isinstance(container, list) else f"{path}.{key}"
                    return f"{name} {_difference(before.get(key), now.get(key))}"
        for (path, tensor), before_shape in zip(self.tensors, self._shapes, strict=True):
            if (tensor.shape, tensor.data_ptr()) != before_shape:
                return f"{path} has other memory"
        return ""

    def holds(self) -> bool:
        """Whether nothing is other than it was in Python; quick."""
        for _, container, content in self._contents:
            if len(container) != len(content):
                return False
            if isinstance(content, dict):
                for key, value in content.items():
                    now = container.get(key, self)
                    if now is not value and not (is_plain(value) and now == value):
                        return False
            elif not all(now is value for now, value in zip(container, content, strict=True)):
                return False
        return all(
            tensor.data_ptr() == pointer for (_, tensor), (_, pointer) in zip(self.tensors, self._shapes, strict=True)
        )


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (is_plain(before) and type(now) is type(before) and now == before)


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        if before.shape != now.shape:
            return f"grows from {list(before.shape)} to {list(now.shape)}"
        return "is another tensor after each call"
    if is_plain(before) and is_plain(now):
        return f"changes from {before!r} to {now!r}"
    return "is another object after each call"
