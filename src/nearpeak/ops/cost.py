"""`Cost`: the least work of one op, memory by storage; and the registry of formulas.

A formula is a function of an `Op` that returns a `Cost`, registered under the exact names of the operators that it
serves. A name with its overload ("aten.sum.dim_IntList") goes before the operator ("aten.sum"), which stands for all of
its overloads. A name that is registered twice is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nearpeak.ops.fast_init import fast_init, positional_constructor
from nearpeak.ops.op import Op
from nearpeak.ops.op_classes import OpClasses, classify_ops
from nearpeak.ops.tensor import Tensor
from nearpeak.ops.work import Work

Family = Literal[
    "matrix",
    "attention",
    "convolution",
    "recurrent",
    "linalg",
    "pointwise",
    "reduction",
    "normalization",
    "loss",
    "indexing",
    "sorting",
    "movement",
    "creation",
    "pooling",
    "fourier",
    "random",
    "optimizer",
    "quantization",
    "collective",
    "declared",
    "view",
    "unknown",
]
Model = Literal["formula", "operands", "none"]
"""Where a cost comes from: a formula, the bytes of the operands (a floor all the same), or nowhere."""

_PRODUCTS = frozenset({"matrix", "attention", "convolution", "recurrent"})
"""Families whose FLOPs are those of matrix products."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Bytes of one storage that are read or written."""

    storage: int
    bytes: float


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The least work of an op: reads and writes by storage, FLOPs by engine and the dtype that it computes in."""

    family: Family
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    flops: Mapping[str, float] = field(default_factory=dict)
    """On the matrix engine, by the dtype names of ceilings: "bfloat16", "tfloat32", "float8", ..."""
    vector_flops: Mapping[str, float] = field(default_factory=dict)
    model: Model = "formula"
    products: Mapping[str, float] | None = None
    """FLOPs of its products in the direct form, where they are not just the FLOPs above: see `product_flops`."""

    @property
    def product_flops(self) -> Mapping[str, float]:
        """FLOPs of matrix products, convolutions and attention in the direct form, by dtype, on whichever engine.

        The fields above are the least: fast algorithms of convolutions count there, and vector work beside products.
        """
        if self.products is not None:
            return self.products
        if self.family in _PRODUCTS:
            return self.flops or self.vector_flops
        return self.flops if self.family == "declared" else {}

    @property
    def direct_flops(self) -> float:
        """All FLOPs, convolutions in the direct form: the count that is shown, and that rates are of.

        The bound has the least that a fast algorithm needs, which is another count.
        """
        vector = sum(self.vector_flops.values())
        if self.family != "convolution" or self.products is None:
            return sum(self.flops.values()) + vector
        return sum(self.products.values()) + (vector if self.flops else 0.0)

    @property
    def work(self) -> Work:
        """The sums over storages."""
        return Work(
            flops=self.flops,
            vector_flops=self.vector_flops,
            bytes_read=sum(access.bytes for access in self.reads),
            bytes_written=sum(access.bytes for access in self.writes),
        )


Formula = Callable[[Op], Cost]
"""The result depends on the name, the arguments, the outputs and the flags of an op, and not on its position."""

_FORMULAS: dict[str, Formula] = {}


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Registers a formula under operator names."""

    def register(function: Formula) -> Formula:
        for name in names:
            if name in _FORMULAS:
                raise ValueError(f"{name} has a formula already: {_FORMULAS[name].__qualname__}")
            _FORMULAS[name] = function
        return function

    return register


def registered() -> dict[str, Formula]:
    """All formulas by name."""
    from nearpeak.ops import formulas  # noqa: F401  # importing a family registers its formulas

    return _FORMULAS


Part = Tensor | tuple[Tensor, float]
"""A tensor, or so many bytes of it."""


def accesses(*items: Part | None) -> tuple[Access, ...]:
    """Accesses to tensors: all bytes of each, or as many as are given with it. The same memory counts once.

    Two views of one storage that are not the same view count both, up to what they can hold together.
    """
    seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], float] = {}
    for item in items:
        if item is None:
            continue
        tensor, size = item if isinstance(item, tuple) else (item, item.bytes)
        key = (tensor.storage, tensor.offset, tensor.shape, tensor.strides)
        seen[key] = max(seen.get(key, 0.0), size)
    return tuple(Access(storage=key[0], bytes=size) for key, size in seen.items() if size)


def least_bytes(table: Tensor, fixed: Collection[int], shape: tuple[int, ...] | None = None) -> float:
    """The fewest bytes of `table` that an access touches which goes over `shape` and picks freely along `fixed`.

    Every place along the other dimensions is another element, so this is one slice; where strides overlap, two places
    may be the same element, and this is one element.
    """
    sizes = list(table.shape if shape is None else shape)
    if 0 in sizes or not table.elements:
        return 0.0
    for dimension in fixed:
        sizes[dimension] = 1
    distinct = 1
    for size, stride in zip(table.shape, table.strides, strict=True):
        distinct *= size if stride else 1
    if table.bytes < distinct * table.item_bytes:
        return table.item_bytes
    return replace(table, shape=tuple(sizes)).bytes


def cost_of(op: Op) -> Cost:
    """The cost of an op: by its formula, else nothing for a view, else the bytes of its results."""
    formula = _formula_of(op)
    if formula is not None:
        return formula(op)
    storages = {tensor.storage for tensor in op.inputs}
    if not op.mutated and op.outputs and all(tensor.storage in storages for tensor in op.outputs):
        return Cost(family="view")
    if not op.outputs and not op.mutated:
        return Cost(family="unknown", model="none")
    return Cost(family="unknown", writes=accesses(*op.outputs), model="operands")


def _formula_of(op: Op) -> Formula | None:
    formulas = registered()
    return formulas.get(op.name) or formulas.get(op.packet if op.origin == "torch" else op.origin)


def costs_of(ops: Sequence[Op], kinds: OpClasses | None = None) -> tuple[Cost, ...]:
    """The costs of many ops: `cost_of` is called once per kind, and ops of one kind share their mappings of FLOPs."""
    kinds = kinds or classify_ops(ops)
    memoized: list[Cost | None] = []
    for first, memo in zip(kinds.firsts, kinds.memos, strict=True):
        formula = _formula_of(ops[first])
        if memo.get("formula") is not formula:  # a cost may have been declared since
            memo.clear()
        memo["formula"] = formula
        memoized.append(memo.get("cost"))
    costs = []
    for index, (kind, storages) in enumerate(zip(kinds.kinds, kinds.storages, strict=True)):
        cost = memoized[kind]
        if cost is not None:
            costs.append(_renamed(cost, storages))
            continue
        cost_here = cost_of(ops[index])
        costs.append(cost_here)
        places = {storage: place for place, storage in enumerate(storages)}
        if all(access.storage in places for access in (*cost_here.reads, *cost_here.writes)):
            memoized[kind] = kinds.memos[kind]["cost"] = _renamed(cost_here, places)
    return tuple(costs)


def _renamed(cost: Cost, storages: Mapping[int, int] | Sequence[int]) -> Cost:
    reads, writes = cost.reads, cost.writes
    if not (reads or writes):
        return cost
    return _make_cost(
        cost.family,
        tuple([_make_access(storages[access.storage], access.bytes) for access in reads]),
        tuple([_make_access(storages[access.storage], access.bytes) for access in writes]),
        cost.flops,
        cost.vector_flops,
        cost.model,
        cost.products,
    )


_make_access, _make_cost = positional_constructor(Access), positional_constructor(Cost)
