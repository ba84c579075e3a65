"""`declare_cost`: the cost of an operator of your own, so that `estimate` can bound it.

An operator that nearpeak does not know is charged only what it writes: whether it reads its arguments, and how much
it computes, cannot be seen from outside. A declaration says so.

The short form names the arguments that are read and counts FLOPs; what the operator writes is known:

>>> declare_cost("mylib::swiglu", reads=("gate", "up"), vector_flops=lambda op: 2 * op.tensor("gate").elements)

The long form is a function of the `Op` that gives a `Cost`. Use it where less than a whole tensor is read:

>>> @declare_cost("mylib::take_rows")
... def take_rows(op):
...     table, rows = op.tensor("table"), op.tensor("rows")
...     row = table.bytes / table.shape[0]  # all rows may be the same
...     return Cost(family="declared", reads=accesses(rows, (table, row)), writes=accesses(*op.written))
>>> forget_cost("mylib::swiglu"), forget_cost("mylib::take_rows")
(None, None)

A cost must be a floor: count what no implementation can leave out, not what yours does. A formula may look at the
arguments and results of its op, not at its place: ops that differ in nothing else share one cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, overload

from nearpeak.errors import NearpeakError, UsageError, did_you_mean
from nearpeak.ops.cost import Cost, Family, Formula, accesses, registered
from nearpeak.ops.formulas.matrix import engines, vector_dtype
from nearpeak.ops.op import Op, origin_of_name

Count = float | Callable[[Op], float]
_NAME = re.compile(r"\w+\.\w+(\.\w+)?")

_declared: dict[str, str] = {}
"""Names of operators with a declared cost, and where it was declared."""
_hidden: dict[str, Formula] = {}
"""Formulas of nearpeak that a declaration replaces."""


@overload
def declare_cost(operator: Any, *, replace: bool = False) -> Callable[[Formula], Formula]: ...
@overload
def declare_cost(
    operator: Any,
    *,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    flops: Count = 0,
    vector_flops: Count = 0,
    family: Family = "declared",
    replace: bool = False,
) -> None: ...
def declare_cost(
    operator: Any,
    *,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    flops: Count | None = None,
    vector_flops: Count | None = None,
    family: Family | None = None,
    replace: bool = False,
) -> Callable[[Formula], Formula] | None:
    """Registers the cost of an operator: with keywords at once, without them as a decorator of a formula.

    `operator` is "mylib::my_op", "mylib.my_op", `torch.ops.mylib.my_op` or what `torch.library.custom_op` gave; with an
    overload ("mylib::my_op.out") it holds for that one alone.

    A Triton kernel that the code launches itself is "triton::kernel_name".

    `reads` are the names of the arguments that are read in full; by default all tensors that are not only written.
    `writes` are the names of the arguments that are written in full; by default what the operator's schema says. A
    Triton kernel has no schema, so `writes` is required for it.
    `flops` run on the matrix engine in the dtype of the first tensor, `vector_flops` on the vector units; each is a
    number or a function of the `Op`. `family` says what the op may be fused with: "declared" with nothing, "pointwise"
    with its neighbors.

    A second declaration is an error unless `replace` is set; so is one for an operator that nearpeak knows.
    """
    name = operator_name(operator)
    if reads is None and writes is None and flops is None and vector_flops is None and family is None:

        def register(function: Formula) -> Formula:
            _register(name, function, replace=replace)
            return function

        return register
    names = None if reads is None else tuple(reads)
    written = None if writes is None else tuple(writes)
    if written is None and origin_of_name(name) == "triton":
        raise UsageError(f"What the kernel {name} writes is not known: give writes=, the names of those arguments.")

    def formula(op: Op) -> Cost:
        return _short(op, names, written, flops or 0, vector_flops or 0, family or "declared")

    _register(name, formula, replace=replace)
    return None


def forget_cost(operator: Any) -> None:
    """Removes a declared cost; a formula of nearpeak that it replaced is used again."""
    name = operator_name(operator)
    if name not in _declared:
        raise UsageError(f"{name} has no declared cost. {did_you_mean(name, _declared)}")
    del _declared[name]
    formulas = registered()
    if name in _hidden:
        formulas[name] = _hidden.pop(name)
    else:
        del formulas[name]


def operator_name(operator: Any) -> str:
    """The name under which ops are recorded.

    >>> operator_name("mylib::my_op"), operator_name("mylib.my_op.out")
    ('mylib.my_op', 'mylib.my_op.out')
    """
    qualified_name = operator
    if not isinstance(operator, str):  # torch's own objects, known by what they have: this module imports no torch
        qualified_name = getattr(operator, "_qualname", None) or getattr(operator, "_qualified_op_name", None)
        if qualified_name is None and callable(getattr(operator, "name", None)) and hasattr(operator, "namespace"):
            qualified_name = operator.name()
            qualified_name = qualified_name if "::" in qualified_name else f"{operator.namespace}::{qualified_name}"
    name = str(qualified_name).replace("::", ".")
    if qualified_name is None or not _NAME.fullmatch(name):
        raise UsageError(
            f"{operator!r} names no operator. Give its namespace and name, such as 'mylib::my_op', or the operator, "
            "such as torch.ops.mylib.my_op."
        )
    return name


def _register(name: str, function: Formula, *, replace: bool) -> None:
    formulas = registered()
    current = formulas.get(name)
    if current is not None and not replace:
        where = _declared.get(name, "nearpeak's own")
        raise UsageError(
            f"{name} has a cost already ({where}). Pass replace=True to use this one instead"
            + (", or call forget_cost first." if name in _declared else ".")
        )
    if current is not None and name not in _declared:
        _hidden[name] = current
    formulas[name] = _checked(name, function)
    _declared[name] = _place(function)


def _place(function: Formula) -> str:
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename == __file__:
        return "declared by keywords"
    return f"declared in {code.co_filename}:{code.co_firstlineno}"


def _checked(name: str, function: Formula) -> Formula:
    """The formula, whose errors name the operator that it was declared for."""

    def formula(op: Op) -> Cost:
        try:
            cost = function(op)
        except NearpeakError:
            raise
        except Exception as error:
            raise UsageError(
                f"The cost declared for {name} failed: {type(error).__name__}: {error}. "
                f"The op has the arguments {', '.join(op.arguments)}."
            ) from error
        if not isinstance(cost, Cost):
            raise UsageError(f"The cost declared for {name} gave {cost!r}, which is no nearpeak.Cost.")
        work = cost.work
        if min(work.bytes_read, work.bytes_written, *work.flops.values(), *work.vector_flops.values()) < 0:
            raise UsageError(f"The cost declared for {name} is negative: {work}.")
        return cost

    return formula


def _short(
    op: Op,
    reads: tuple[str, ...] | None,
    writes: tuple[str, ...] | None,
    flops: Count,
    vector_flops: Count,
    family: Family,
) -> Cost:
    written_names = op.mutated if writes is None else writes
    read_names = tuple(name for name in op.arguments if name not in written_names) if reads is None else reads
    for name in (*read_names, *written_names):
        if name not in op.arguments:
            raise UsageError(f"{op.name} has no argument {name!r}. {did_you_mean(name, op.arguments)}")
    read = op.tensors(*read_names)
    written = op.written if writes is None else (*op.outputs, *op.tensors(*writes))
    dtype = next((tensor.dtype for tensor in (*read, *written) if tensor.is_floating), "float32")
    matrix, vector = engines(dtype, _count(op, flops), tf32=op.tf32_products)
    extra = _count(op, vector_flops)
    if extra:
        vector[vector_dtype(dtype)] = vector.get(vector_dtype(dtype), 0.0) + extra
    return Cost(family=family, reads=accesses(*read), writes=accesses(*written), flops=matrix, vector_flops=vector)


def _count(op: Op, count: Count) -> float:
    return float(count(op) if callable(count) else count)
