"""The same op in another form, to ask what it would take: in another dtype, or with other sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from statistics import median
from typing import Any

from nearpeak.diagnose.examined import Examined
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


def with_dtype(op: Op, old: str, new: str) -> Op:
    """An op with all tensors of one dtype in another."""
    arguments = {name: _as(value, old, new) for name, value in op.arguments.items()}
    return dataclasses.replace(op, arguments=arguments, outputs=_as(op.outputs, old, new))


def _as(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Tensor):
        return dataclasses.replace(value, dtype=new) if value.dtype == old else value
    if isinstance(value, (tuple, list)):
        return tuple(_as(item, old, new) for item in value)
    return value


def product_of(batch: int, m: int, n: int, k: int, *, dtype: str, tf32: bool = False) -> Op:
    """A product of dense matrices of these sizes, none of which the step has."""
    sizes = ((m, k), (k, n), (m, n))
    left, right, out = (
        Tensor(
            shape=(batch, rows, columns) if batch > 1 else (rows, columns),
            strides=(rows * columns, columns, 1) if batch > 1 else (columns, 1),
            dtype=dtype,
            storage=-1 - number,
        )
        for number, (rows, columns) in enumerate(sizes)
    )
    name = "aten.bmm.default" if batch > 1 else "aten.mm.default"
    return Op(name=name, arguments={"self": left, "mat2": right}, outputs=(out,), tf32_products=tf32)


def slowness(step: Examined, index: int) -> float:
    """How many times as long an op took as a good kernel would take; 1 where it was not slower."""
    expected = step.expected(step.ops[index])
    return max(1.0, step.measured[index].measured_s / expected) if expected else 1.0


def usual_slowness(step: Examined, products: Collection[int]) -> float:
    """The median of how many times as long products took as good kernels take; at least 1."""
    ratios = [
        step.measured[index].measured_s / expected
        for index in products
        if (expected := step.expected(step.ops[index])) and step.measured[index].measured_s
    ]
    return max(1.0, median(ratios)) if ratios else 1.0
