"""`OperatorSchema`: the facts about an operator that are needed for each of its calls, looked up once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nearpeak.ops.op import Origin
from nearpeak.trace.storages import Storages

_QUERY_NAMESPACES = frozenset({"prim", "profiler"})
"""Namespaces whose operators query tensors or mark time, and touch no data."""
_LIFT_OPERATORS = frozenset({"aten.lift_fresh.default", "aten.lift.default", "aten.lift_fresh_copy.default"})
"""Operators that `torch.tensor(...)` applies to its data."""

_PURE_NAMESPACES = frozenset({"aten", "prims"})
"""Namespaces of operators whose results follow from their arguments; those of a custom operator may not."""
_VALUE_DEPENDENT_TAGS = ("data_dependent_output", "dynamic_output_shape", "inplace_view")
"""Tags of operators whose results depend on values, or that change the shape of an argument."""
_UNTAGGED = frozenset({"aten._pack_padded_sequence.default"})
"""Operators whose results depend on values, and that are not tagged so."""
_BACKENDS = ("CPU", "CUDA", "MPS")
_INDEXING = frozenset({"aten.index.Tensor"})
"""Tagged as dynamic, which it is for masks alone; these are excluded by dtype."""
_CHANGES_STORAGE = ("resize", "set_", "_resize", "swap", "lift", "rename")
"""How the names of operators begin that change the storage or name of an argument, or that torch treats specially."""


class OperatorSchema(NamedTuple):
    """Facts about one operator."""

    name: str
    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    """All arguments in the order of the schema; None stands for those that have no default, which are always given."""
    mutated: tuple[str, ...]
    query: bool = False
    lift: bool = False
    composite: bool = False
    memoizable: bool = False
    """Its results follow from the signature of a call: torch is asked once for each signature."""
    value_dependent: bool = False
    """Its result, or the shape of it, depends on the values of tensors."""
    by_rows: bool = False
    """It does the same to each row of its lists of tensors: the result of a row follows from the row alone."""
    origin: Origin = "torch"


_schemas: dict[int, tuple[Any, OperatorSchema]] = {}
"""By the id of the operator, which is stored too: its hash is a slow Python function."""


def schema_of(operator: Any) -> OperatorSchema:
    """The facts of an operator."""
    cached = _schemas.get(id(operator))
    if cached is None:
        cached = _schemas[id(operator)] = (operator, _build_schema(operator))
    return cached[1]


def _build_schema(operator: Any) -> OperatorSchema:
    if not isinstance(operator, torch._ops.OpOverload):  # a higher-order operator has no schema
        return OperatorSchema(f"higher_order.{operator.name()}", (), {}, ())
    arguments = operator._schema.arguments
    query = operator.namespace in _QUERY_NAMESPACES or operator._opname.startswith(
        ("sym_", "is_pinned", "is_same_size")
    )
    lift = str(operator) in _LIFT_OPERATORS
    composite = not query and is_composite(operator)
    return OperatorSchema(
        name=str(operator),
        arguments=tuple(argument.name for argument in arguments),
        defaults={
            argument.name: Storages().value(argument.default_value, "input") if argument.has_default_value() else None
            for argument in arguments
        },
        mutated=tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        query=query,
        lift=lift,
        composite=composite,
        memoizable=not (query or lift or composite) and _is_memoizable(operator),
        value_dependent=str(operator) in _UNTAGGED
        or any(getattr(torch.Tag, name, None) in operator.tags for name in _VALUE_DEPENDENT_TAGS[:2]),
        by_rows=operator.namespace == "aten" and operator._opname.startswith("_foreach_"),
    )


def is_composite(operator: Any) -> bool:
    """Whether torch runs other operators in its place: it is composed of them, and no device has a kernel for it.

    The dispatcher tells. The operator's own method counts decompositions in Python, which torch does not run here.
    """
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not any(has_kernel(name, key) for key in _BACKENDS)


def _is_memoizable(operator: Any) -> bool:
    """Whether the results of an operator depend on the signature of a call alone."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace not in _PURE_NAMESPACES:
        return False
    arguments = operator._schema.arguments
    if any(argument.kwarg_only and argument.alias_info is not None for argument in arguments):  # `out` may be resized
        return False
    if operator._opname.startswith(_CHANGES_STORAGE):
        return False
    tags = {getattr(torch.Tag, name, None) for name in _VALUE_DEPENDENT_TAGS}
    return str(operator) in _INDEXING or not any(tag in tags for tag in operator.tags)
