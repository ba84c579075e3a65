"""What a call may change and the program goes on with: `ArgumentState` of its arguments, `ModuleState` of a model.

A model is run many times on the batch of one call while it is fixed. What a run changes in objects that the program
goes on with is put back: attributes and items get the same objects again, and tensors the same values.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nearpeak.trace.interrupts import defer_signals

MOST_OBJECTS = 20_000
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size, type(None))
_SHARED = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, torch.Generator)
"""Are no state of a call."""
_CONTAINERS = (dict, list, tuple, OrderedDict, defaultdict)
MODULE_INTERNALS = frozenset((*vars(nn.Module()), "_compiled_call_impl", "forward"))
"""Attributes that torch keeps in a module, and those that decide how it is called."""


def is_plain(value: Any) -> bool:
    """Whether a value cannot change."""
    return isinstance(value, _PLAIN)


def attributes_held_by(value: Any) -> dict[Any, Any] | None:
    """The items of a dictionary, or the attributes of an object with some, such as a configuration; None for what has
    none of its own, or does not belong to its holder."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (Tensor, *_SHARED)) or is_plain(value):
        return None
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def leaves_of(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments; an object of a class of its own is one, whatever is registered for it."""
    return pytree.tree_flatten(tree, is_leaf=lambda value: type(value) not in _CONTAINERS)


class _Values:
    """The values that tensors have now."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._copies = [
            (each, each.detach().clone(), version_of(each)) for each in {id(x): x for x in tensors}.values()
        ]

    @property
    def written(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors that an op of torch has written to since, with their values."""
        return [(x, value) for x, value, before in self._copies if before is None or version_of(x) != before]

    @torch.no_grad()
    def restore(self, *, written: bool = False) -> None:
        """`written` leaves alone what no op of torch has written to; a graph that is replayed writes unseen."""
        for tensor, value in self.written if written else [(x, value) for x, value, _ in self._copies]:
            tensor.copy_(value)


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def _has_own_elements(tensor: Tensor) -> bool:
    """Whether all elements have memory of their own, so that they can be written."""
    return all(size < 2 or stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class ModuleState:
    """What the modules of a model hold now, besides parameters: buffers, and attributes such as counters.

    Lists, dictionaries and sets that are attributes are looked into, and those that forwards and hooks name, as what a
    hook collects; and tensors that are attributes. Other objects are not.
    """

    def __init__(self, model: nn.Module, *, values: bool = True) -> None:
        """`values` copies the values of tensors too, so that they can be restored."""
        self._contents: list[tuple[str, Any, Any]] = []
        tensors: list[Tensor] = []
        for path, module in model.named_modules():
            own = vars(module)
            held = {name: value for name, value in own.items() if name not in MODULE_INTERNALS}
            self._contents.append((path, own, {**own}))
            self._contents.append((path, module._buffers, {**module._buffers}))
            noted = [*held.values(), *_named_in(type(module).forward)]
            noted += [value for name in _HOOKS for hook in own.get(name, {}).values() for value in _named_in(hook)]
            self._contents += [(path, value, value.copy()) for value in noted if _is_collection(value)]
            tensors += [x for x in (*held.values(), *module._buffers.values()) if isinstance(x, Tensor)]
        tensors = tensors if values else []
        # what has a gradient may be part of a graph, which a write would end
        free = [x.layout == torch.strided and not x.requires_grad and _has_own_elements(x) for x in tensors]
        self._values = _Values(itertools.compress(tensors, free))
        self._others = _Values(itertools.compress(tensors, [not each for each in free]))

    def restore(self) -> None:
        """Puts everything back, in place."""
        _restore(self._contents, self._values, self._others)

    @property
    def is_same(self) -> bool:
        """Whether attributes, and what lists and dictionaries among them hold, are the same objects."""
        return all(_holds_same(container, content) for _, container, content in self._contents)


@contextmanager
def undisturbed_stack() -> Iterator[ExitStack]:
    """A stack of contexts whose ends Ctrl-C waits for."""
    stack = ExitStack()
    try:
        yield stack
    finally:
        with defer_signals():
            stack.close()


@contextmanager
def preserve_module_state(model: nn.Module) -> Iterator[None]:
    """At the end, also by an error, buffers and attributes of a model are as they were: running statistics, counters,
    caches."""
    state = ModuleState(model)
    try:
        yield
    finally:
        state.restore()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_collection(value: Any) -> bool:
    return type(value) in (dict, list, set, deque, OrderedDict, defaultdict) and len(value) <= MOST_OBJECTS


def _named_in(function: Any) -> list[Any]:
    """What the code of a function finds by names: variables of the functions around it, and globals."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    space = function.__globals__
    return [*cells, *(space[name] for name in function.__code__.co_names if name in space)]


def _holds_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(content, dict):
        return all(name in container and container[name] is value for name, value in content.items())
    if isinstance(content, set):
        return bool(container == content)
    return all(now is value for now, value in zip(container, content, strict=True))


def _restore(contents: Iterable[tuple[str, Any, Any]], values: _Values, others: _Values) -> None:
    """Puts back what containers held and the values of tensors; of `others`, of those that were written."""
    with defer_signals():
        for _, container, content in contents:
            if not _holds_same(container, content):
                _refill(container, content)
        values.restore()
        others.restore(written=True)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


class ArgumentState:
    """What some arguments hold now: the values of tensors, and what objects such as caches have. False where a call can
    only have written to tensors, and has not."""

    def __init__(self, args: Any, kwargs: Any, *, values: bool = True) -> None:
        """`values` copies the values of tensors too, so that they can be restored."""
        self._contents: list[tuple[str, Any, Any]] = []
        """A path, a dictionary or list, and a copy of it."""
        self.tensors: list[tuple[str, Tensor]] = []
        self._seen: set[int] = set()
        given = leaves_of((args, kwargs))[0]
        for leaf in given:
            if not isinstance(leaf, Tensor):
                self._follow(type(leaf).__name__, leaf)
        self._values = _Values([tensor for _, tensor in self.tensors] if values else [])
        self._given = _Values([leaf for leaf in given if isinstance(leaf, Tensor)] if values else [])
        self._shapes = [(tensor.shape, tensor.data_ptr()) for _, tensor in self.tensors]

    def __bool__(self) -> bool:
        return bool(self._contents or self._given.written)

    def _follow(self, path: str, value: Any) -> None:
        if is_plain(value) or isinstance(value, _SHARED) or id(value) in self._seen or len(self._seen) > MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((path, value))
        elif isinstance(value, (tuple, set, frozenset)):
            if isinstance(value, set):
                self._contents.append((path, value, value.copy()))
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
        _restore(self._contents, self._values, self._given)

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
            if isinstance(content, set):
                if container != content:
                    return f"{path} has other members"
                continue
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
            elif isinstance(content, set):
                if container != content:
                    return False
            elif not all(now is value for now, value in zip(container, content, strict=True)):
                return False
        return all(
            tensor.data_ptr() == pointer for (_, tensor), (_, pointer) in zip(self.tensors, self._shapes, strict=True)
        )

    def is_like(self, other: ArgumentState) -> bool:
        """Whether other arguments differ in the values of tensors alone, and each tensor has memory of its own."""
        if [path for path, *_ in self._contents] != [path for path, *_ in other._contents]:
            return False
        if [_form(*each) for each in self.tensors] != [_form(*each) for each in other.tensors]:
            return False
        if any(
            len({x.untyped_storage().data_ptr() for _, x in each}) < len(each) for each in (self.tensors, other.tensors)
        ):
            return False
        return all(_is_like(mine, its) for (*_, mine), (*_, its) in zip(self._contents, other._contents, strict=True))


def _form(path: str, tensor: Tensor) -> tuple[Any, ...]:
    return path, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, type(tensor)


def _is_like(mine: Any, its: Any) -> bool:
    """Whether two dictionaries, lists or sets have the same, of what is not followed itself."""
    if type(mine) is not type(its) or len(mine) != len(its):
        return False
    if isinstance(mine, set):
        return bool(mine == its)
    pairs = zip(mine, its, strict=True)
    if isinstance(mine, dict):
        if list(mine) != list(its):
            return False
        pairs = zip(mine.values(), its.values(), strict=True)
    return all(
        type(one) is type(other) and not isinstance(one, _SHARED) and (not is_plain(one) or one == other)
        if one is not other
        else True
        for one, other in pairs
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
