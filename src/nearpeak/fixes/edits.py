"""`Edits`: the undo log of a fix. Every change of an object goes through it, and is put back exactly.

An object that several logs have changed has a stack of their values: undoing one of them takes its own value out and
leaves those of the others, in any order; when the last one is gone the object is as it was found, with the attribute
deleted where there was none. A value that somebody else has put there meanwhile is left alone.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from nearpeak.errors import UsageError
from nearpeak.trace.interrupts import defer_signals

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""Stands for the value of an attribute or an item that is not there."""
MARK = "nearpeak_fix"
"""The attribute by which a forward of ours is known."""


class Edits:
    """Changes to objects, in order. `undo` puts all of them back, or those since a `mark`."""

    def __init__(self) -> None:
        self._log: list[tuple[_Place, _Layer]] = []
        self.foreign: list[str] = []
        """What was left alone when it was undone: others had changed it since."""

    def mark(self) -> int:
        """The place in the log to which `undo` goes back."""
        return len(self._log)

    def undo(self, to: int = 0) -> None:
        """Puts back what was changed since the mark, the last change first."""
        with defer_signals():  # Ctrl-C waits until everything is put back
            while len(self._log) > to:
                place, layer = self._log.pop()
                if not place.remove(layer):
                    self.foreign.append(repr(place))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, all objects are as they were found; afterwards the changes are in force again."""
        log = self._log
        with defer_signals():
            self._log = [*log]
            self.undo()
        try:
            yield
        finally:
            with defer_signals():
                for place, layer in log:
                    place.add(layer)
                    self._log.append((place, layer))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of this object alone: in its `__dict__`, past its class."""
        self._put(_Place.of(vars(owner), name, owner), value)

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Sets an item of a dictionary: an option of a parameter group, an entry of a registry."""
        self._put(_Place.of(mapping, key, mapping), value)

    def set_forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Gives this module another forward: `function(self, *args, **kwargs)`, which is bound to it.

        `function` must reach the module through `self` alone, so that a deep copy of the model has a forward on its own
        parameters. Hooks, parameters and the keys of the state dict stay as they are.
        """
        forward = FunctionType(
            function.__code__, function.__globals__, "forward", function.__defaults__, function.__closure__
        )  # by this name, a module that is pickled has the forward of its class
        forward.__kwdefaults__ = function.__kwdefaults__
        forward.__dict__.update(function.__dict__)
        forward.__dict__[MARK] = True
        self.set(module, "forward", MethodType(forward, module))

    def set_functions(self, module: nn.Module, functions: Mapping[str, Any]) -> None:
        """Has the forward of this module call other functions for the global names that it uses.

        The code of the forward is not copied: a function with the same code gets a copy of its globals, in which the
        names are those of `functions`; "F.silu" is the name in the module that the code calls `F`. Code that compares a
        function too compares the original. Functions that are replaced one after the other add up. Later changes of the
        original globals are not seen.
        """
        current = vars(module).get("forward")
        forward = current.__func__ if isinstance(current, MethodType) else type(module).forward
        self.set_forward(module, with_globals(forward, functions))

    def do(self, change: Callable[[], Any], undo: Callable[[], Any]) -> None:
        """Makes a change that is no attribute and no item, with what puts it back, also where it was made in part."""
        self._put(_Call(change, undo), None)

    def _put(self, place: _Place, value: Any) -> None:
        layer = _Layer(value)
        with defer_signals():
            place.add(layer)
            self._log.append((place, layer))


class _Layer:
    """One value of one log; two logs may set equal ones."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Place:
    """An item of a dictionary, with the values that logs have put there; the first is what was found."""

    def __init__(self, mapping: MutableMapping[Any, Any], key: Any, owner: Any) -> None:
        self._mapping, self._key, self._owner = mapping, key, type(owner).__name__
        self._layers: list[_Layer] = []

    def __repr__(self) -> str:
        return f"{self._key} of {self._owner}"

    @classmethod
    def of(cls, mapping: MutableMapping[Any, Any], key: Any, owner: Any) -> _Place:
        """The place that other logs know as well."""
        place = _places.get((id(mapping), key))
        if place is None:
            place = _places[id(mapping), key] = cls(mapping, key, owner)
        return place

    def add(self, layer: _Layer) -> None:
        if not self._layers:
            self._layers.append(_Layer(self._mapping.get(self._key, ABSENT)))
        self._layers.append(layer)
        self._mapping[self._key] = layer.value

    def remove(self, layer: _Layer) -> bool:
        """Whether it could be put back: the value is that of a log, and nobody else's."""
        is_ours = self._mapping.get(self._key, ABSENT) is self._layers[-1].value
        self._layers.remove(layer)
        if is_ours and self._layers[-1].value is ABSENT:
            self._mapping.pop(self._key, None)
        elif is_ours:
            self._mapping[self._key] = self._layers[-1].value
        if len(self._layers) == 1:
            self._layers.clear()
        return is_ours


class _Call(_Place):
    """A change that only functions know how to make and to put back."""

    def __init__(self, change: Callable[[], Any], undo: Callable[[], Any]) -> None:
        self._change, self._undo = change, undo

    def __repr__(self) -> str:
        return f"what {self._change!r} changed"

    def add(self, layer: _Layer) -> None:
        try:
            self._change()
        except BaseException:
            self._undo()
            raise

    def remove(self, layer: _Layer) -> bool:
        self._undo()
        return True


_places: WeakValueDictionary[tuple[int, Any], _Place] = WeakValueDictionary()
"""By the id of a dictionary and the key. The logs hold the places, and these the dictionaries, so that an id stays its
own as long as it is needed, and a model that nobody uses is freed."""


def with_globals(function: Callable[..., Any], replacements: Mapping[str, Any]) -> FunctionType:
    """A function with the same code that finds other objects by some global names; decorators around it are kept."""
    inner = innermost(function)
    if any(instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for instruction in dis.get_instructions(inner)):
        raise UsageError(
            f"{inner.__qualname__} sets global variables; its functions cannot be replaced for one module."
        )
    changed = {**inner.__globals__}
    # Without it, torch.compile does not look for names in the module of the function, which has the others.
    changed.pop("__name__", None)
    code = inner.__code__
    for name, value in replacements.items():
        first, _, rest = name.partition(".")
        if not rest:
            code, first = _with_own_calls(code, name)
        changed[first] = _with_attribute(changed[first], rest, value) if rest else value
    return _rebuild(function, inner, code, changed)


def _with_own_calls(code: CodeType, name: str) -> tuple[CodeType, str]:
    """The name by which code calls a global function, with the code: another name if it also does something else with
    the function, as in `if self.rotate is rotate`, for which it must stay the same object."""
    loads = [each for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL" and each.argval == name]
    calls = [each for each in loads if each.arg is not None and each.arg & _FOR_CALL]
    if len(calls) == len(loads):
        return code, name
    own = f"{name}()"
    if own in code.co_names:
        return code, own
    index = len(code.co_names) << 1 | _FOR_CALL
    if index > _LARGEST_ARGUMENT or any((each.arg or 0) > _LARGEST_ARGUMENT for each in calls):
        raise UsageError(f"{code.co_qualname} compares {name}, among more names than can be told apart.")
    instructions = bytearray(code.co_code)
    for each in calls:
        instructions[each.offset + 1] = index
    return code.replace(co_code=bytes(instructions), co_names=(*code.co_names, own)), own


_FOR_CALL = 1
"""The bit of the argument of `LOAD_GLOBAL` with which what is loaded is called next; the others are the name."""
_LARGEST_ARGUMENT = 255
"""Of one instruction: a larger one has another instruction before it."""


def innermost(function: Callable[..., Any]) -> FunctionType:
    """The function that decorators have wrapped, as far as they say so."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        raise UsageError(f"{function!r} is no function of Python's.")
    return function


def code_objects(function: Callable[..., Any]) -> Iterator[CodeType]:
    """The code of a function and of what its decorators have wrapped."""
    while True:
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code
        if not hasattr(function, "__wrapped__"):
            return
        function = function.__wrapped__


def _rebuild(function: Any, inner: FunctionType, code: CodeType, changed: dict[str, Any]) -> FunctionType:
    """`function` around a copy of `inner` with this code and other globals; the cells of decorators have the copy."""
    if function is inner:
        cells, own_code, space = inner.__closure__, code, changed
    elif isinstance(function, FunctionType):
        cells = tuple(_rebuild_cell(cell, inner, code, changed) for cell in function.__closure__ or ())
        own_code, space = function.__code__, function.__globals__
    else:
        raise UsageError(f"{inner.__qualname__} is wrapped by {function!r}, which is no function of Python's.")
    copy = FunctionType(own_code, space, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    if function is not inner:
        copy.__dict__["__wrapped__"] = _rebuild(function.__dict__["__wrapped__"], inner, code, changed)
    return copy


def _rebuild_cell(cell: CellType, inner: FunctionType, code: CodeType, changed: dict[str, Any]) -> CellType:
    content = cell.cell_contents
    if isinstance(content, FunctionType) and inner.__code__ in code_objects(content):
        return CellType(_rebuild(content, inner, code, changed))
    return cell


def _with_attribute(namespace: Any, path: str, value: Any) -> Any:
    """A namespace like this one in which one attribute is another."""
    first, _, rest = path.partition(".")
    inner = _with_attribute(getattr(namespace, first), rest, value) if rest else value
    copy = ModuleType(getattr(namespace, "__name__", first))  # which has the `__getattr__` of a module too
    copy.__dict__.update({**vars(namespace), first: inner})
    return copy
