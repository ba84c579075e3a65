"""Operators of libraries that need not be installed: their arguments by position, as trace files have them.

A schema is text such as `_C::rms_norm(w result, r input, r weight, epsilon)`. A tensor has a letter before its
name: `r` is read whole, `w` written whole, `rw` both, `t` is a tensor of which the formula says what is touched; with a
`?`, it may be absent. `dtype` stands before an argument that is one. What has nothing before it is no tensor. `...` are
further arguments, which the formula finds under `rest`. An operator has a schema for each of its versions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from nearpeak.ops.cost import Cost, Formula, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

Returned = Callable[[Op], tuple[tuple[tuple[int, ...], str], ...]]
"""The shapes and dtypes of the results of an op, from its arguments."""

_SCHEMA = re.compile(r"(\w+)::(\w+)\(([^)]*)\)")
_MODES = frozenset({"r", "w", "rw", "t"})


class CustomParameter(NamedTuple):
    """One argument."""

    name: str
    mode: str
    """"r", "w", "rw" or "t" for a tensor, "dtype", or "" for anything else."""
    optional: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor is passed."""
        return self.mode in _MODES

    @property
    def is_written(self) -> bool:
        """Whether the operator writes it."""
        return "w" in self.mode


class CustomSchema(NamedTuple):
    """One version of an operator."""

    event: str
    """Its name in trace files: "_C::rms_norm"."""
    parameters: tuple[CustomParameter, ...]
    has_rest: bool
    returned: Returned | None

    @property
    def packet(self) -> str:
        """Its name among ops, without the overload: "_C.rms_norm"."""
        return self.event.replace("::", ".")

    def named(self, mode: str) -> tuple[str, ...]:
        """The names of the tensors that are read ("r") or written ("w")."""
        return tuple(parameter.name for parameter in self.parameters if mode in parameter.mode and parameter.is_tensor)


_SCHEMAS: dict[str, list[CustomSchema]] = {}


def custom_schemas(event: str) -> list[CustomSchema]:
    """The versions of an operator, by its name in trace files; none if it is not known.

    >>> [len(schema.parameters) for schema in custom_schemas("_C::rms_norm")]
    [4]
    """
    from nearpeak.ops import formulas  # noqa: F401  # importing a family registers its schemas

    return _SCHEMAS.get(event, [])


def custom(schemas: str, *, returned: Returned | None = None) -> Callable[[Formula], Formula]:
    """Registers a formula for the operators of these schemas; `returned` gives the results of those that have some.

    The formula gets ops with the arguments of a schema, also from a library that names them otherwise.
    """
    parsed = [_parse_schema(match, returned) for match in _SCHEMA.finditer(schemas)]
    if _SCHEMA.sub("", schemas).strip():
        raise ValueError(f"these are no schemas: {_SCHEMA.sub('', schemas).strip()}")

    def register(function: Formula) -> Formula:
        @functools.wraps(function)
        def cost(op: Op) -> Cost:
            named = _with_names(op)
            return (
                Cost(family="unknown", writes=accesses(*op.written), model="operands")
                if named is None
                else function(named)
            )

        for schema in parsed:
            _SCHEMAS.setdefault(schema.event, []).append(schema)
        return formula(*dict.fromkeys(schema.packet for schema in parsed))(cost)

    return register


def read_and_written(op: Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the arguments that an op reads whole and writes whole."""
    schema = next(schema for schema in _versions(op) if _has_names(op, schema))
    return schema.named("r"), schema.named("w")


def _versions(op: Op) -> list[CustomSchema]:
    return _SCHEMAS[op.packet.replace(".", "::", 1)]


def _has_names(op: Op, schema: CustomSchema) -> bool:
    given = {name for name in op.arguments if name != "rest"}
    return given <= {parameter.name for parameter in schema.parameters}


def _with_names(op: Op) -> Op | None:
    """The op with the names of a schema that fits by position; None if none does."""
    values = list(op.arguments.items())
    for schema in _versions(op):
        if _has_names(op, schema):
            return op
        count = len(schema.parameters)
        if len(values) < count or (len(values) > count and not schema.has_rest):
            continue
        pairs = list(zip(schema.parameters, values, strict=False))
        if all(_fits(parameter, value) for parameter, (_, value) in pairs):
            names = {name: parameter.name for parameter, (name, _) in pairs}
            arguments = {parameter.name: value for parameter, (_, value) in pairs}
            arguments["rest"] = tuple(value for _, value in values[count:])
            return replace(op, arguments=arguments, mutated=tuple(names.get(name, name) for name in op.mutated))
    return None


def _fits(parameter: CustomParameter, value: Any) -> bool:
    if not parameter.is_tensor:
        return not isinstance(value, Tensor)
    return isinstance(value, Tensor) or (parameter.optional and value is None)


def _parse_schema(match: re.Match[str], returned: Returned | None) -> CustomSchema:
    arguments = [item.strip() for item in match[3].split(",") if item.strip()]
    has_rest = arguments[-1:] == ["..."]
    parameters = [_parse_parameter(item) for item in (arguments[:-1] if has_rest else arguments)]
    return CustomSchema(f"{match[1]}::{match[2]}", tuple(parameters), has_rest, returned)


def _parse_parameter(text: str) -> CustomParameter:
    *modes, name = text.split()
    mode = " ".join(modes)
    optional = mode.endswith("?")
    mode = mode.removesuffix("?")
    if mode and mode != "dtype" and mode not in _MODES:
        raise ValueError(f"this is no argument of a schema: {text}")
    return CustomParameter(name, mode, optional)
