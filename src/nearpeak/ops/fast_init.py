"""`fast_init` and `positional_constructor`: frozen dataclasses of which very many are made.

The `__init__` of a frozen dataclass sets each field with `object.__setattr__`, because the class forbids assignment.
That is most of the time to make an instance, and a trace makes several per op. Here the new object belongs to a mutable
twin class while its fields are set, and to its own class from then on.

A call with keyword arguments goes through a dictionary. Where that counts, `positional_constructor` makes a function
with positional arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Class = TypeVar("Class")


def fast_init(cls: type[Class]) -> type[Class]:
    """Decorator: the class gets an `__init__` that takes half the time. Do not subclass it.

    >>> from dataclasses import dataclass
    >>> @fast_init
    ... @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x: float
    ...     y: float = 0.0
    >>> Point(x=1.0)
    Point(x=1.0, y=0.0)
    """
    names: dict[str, Any] = {
        "twin": _twin(cls),
        "own": cls,
        "set_class": object.__setattr__,
        "missing": MISSING,
    }
    parameters, lines = [], []
    for field in fields(cls):  # type: ignore[arg-type]
        name = field.name
        if field.default_factory is not MISSING:
            names[f"make_{name}"] = field.default_factory
            parameters.append(f"{name}=missing")
            lines.append(f"self.{name} = make_{name}() if {name} is missing else {name}")
            continue
        if field.default is not MISSING:
            names[f"default_{name}"] = field.default
            parameters.append(f"{name}=default_{name}")
        else:
            parameters.append(name)
        lines.append(f"self.{name} = {name}")
    source = "\n    ".join(
        [
            f"def __init__(self, *, {', '.join(parameters)}):",
            "set_class(self, '__class__', twin)",
            *lines,
            "self.__class__ = own",
        ]
    )
    exec(source, names)  # as dataclass itself does
    cls.__init__ = names["__init__"]  # type: ignore[method-assign]
    cls.__init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return cls


def positional_constructor(cls: type[Class]) -> Callable[..., Class]:
    """A function that makes instances from the values of all fields, in order, in a third of the time.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x: float
    ...     y: float = 0.0
    >>> positional_constructor(Point)(1.0, 2.0)
    Point(x=1.0, y=2.0)
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    source = "\n    ".join(
        [
            f"def make({', '.join(names)}):",
            "self = new(twin)",
            *(f"self.{name} = {name}" for name in names),
            "self.__class__ = own",
            "return self",
        ]
    )
    known: dict[str, Any] = {"twin": _twin(cls), "own": cls, "new": object.__new__}
    exec(source, known)  # as dataclass itself does
    function: Callable[..., Class] = known["make"]
    return function


def _twin(cls: type) -> type:
    """A mutable class of the same layout."""
    body = {"__slots__": cls.__dict__["__slots__"], "__setattr__": object.__setattr__}
    return type(cls.__name__, cls.__bases__, body)
