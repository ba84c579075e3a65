"""A 16-bit GEMM has a size that is no multiple of 8: rows are not aligned to 16 bytes, and slow kernels run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op, median_slowness
from nearpeak.ops.formulas.matrix import result
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

ALIGNMENT = 16
"""The alignment of rows, in bytes, that the copies to the matrix engine need."""
_PADDED = 64
"""Ragged sizes are rounded up to this: whole cache lines in 16 bits, and whole steps along k."""
LEAST_RATIO = 1.1
"""The least ratio of the measured time to that of the padded GEMM."""


@rule("ragged-product")
def ragged_products(step: Step) -> Iterator[Waste]:
    """16-bit GEMMs on a GPU with misaligned rows that take longer than GEMMs with padded sizes."""
    if step.machine.kind != "gpu":
        return
    ragged = {index: sizes for index, op in enumerate(step.ops) if (sizes := _ragged(op)) is not None}
    if not ragged:
        return
    usual = _usual(step, ragged)
    for index, sizes in ragged.items():
        op, took = step.ops[index], step.time(index)
        batch, *edges = sizes
        padded = [math.ceil(size / _PADDED) * _PADDED if size * _width(op) % ALIGNMENT else size for size in edges]
        if padded == edges:
            continue  # a view of something larger
        good = step.expected(gemm_op(batch, *padded, dtype=op.inputs[-1].dtype))
        if good is None or took < LEAST_RATIO * good * usual:
            continue
        m, n, k = edges
        changed = ", ".join(f"{old} to {new}" for old, new in zip(edges, padded, strict=True) if old != new)
        yield Waste(
            title=f"A product has a size that is no multiple of {ALIGNMENT // _width(op)}.",
            op=index,
            gains={index: took - good * usual},
            evidence=f"{op.packet} of {m} x {k} by {k} x {n} in {op.inputs[-1].dtype} takes {seconds(took)}; its rows "
            f"do not begin at multiples of {ALIGNMENT} bytes.",
            reasoning=f"With {changed}, a good kernel takes {seconds(good)}"
            + (f", times {usual:.2f} as the other products of this step." if usual > 1 else "."),
            remedy=_remedy(op, edges, padded, changed),
        )


def _remedy(op: Op, edges: list[int], padded: list[int], changed: str) -> str:
    """What to pad: a layer, where a factor is a weight; else the activations, which have a batch."""
    (_, n, k), (_, wide, deep) = edges, padded
    if op.packet in _BATCHED:
        return f"Pad {changed} in the tensors themselves: sequences to a multiple, with a mask, or heads with zeros."
    layers = f"torch.nn.Linear({deep}, {wide}, bias=False)"
    if wide != n:
        return (
            f"Pad {changed}, the outputs of the layer: {layers},\n"
            "with the columns beyond the real ones left out where they are read; of a vocabulary, never a target."
        )
    if deep != k:
        return f"Pad {changed}, the inputs of the layer: {layers}, with zeros beyond the real ones."
    return f"Pad {changed}, the rows: a batch or a sequence of a multiple of {_PADDED}."


_BATCHED = ("aten.bmm", "aten.baddbmm", "aten.baddbmm_")


def _width(op: Op) -> int:
    return int(op.inputs[-1].item_bytes)


def _ragged(op: Op) -> tuple[int, int, int, int] | None:
    """The sizes of a 16-bit GEMM with a misaligned operand or result."""
    if op.packet not in FACTORS or op.inputs[-1].dtype not in ("bfloat16", "float16"):
        return None
    tensors = (*op.tensors(*FACTORS[op.packet]), result(op))
    return product_sizes(op) if any(_misaligned(tensor) for tensor in tensors) else None


def _misaligned(tensor: Tensor) -> bool:
    if len(tensor.shape) < 2 or min(tensor.shape[-2:]) == 1:
        return False
    return max(tensor.strides[-2:]) * tensor.item_bytes % ALIGNMENT != 0


def _usual(step: Step, ragged: dict[int, tuple[int, int, int, int]]) -> float:
    """The slowness of the other 16-bit GEMMs of the step."""
    others = [
        index
        for index, op in enumerate(step.ops)
        if index not in ragged and op.packet in FACTORS and op.inputs[-1].dtype in ("bfloat16", "float16")
    ]
    return median_slowness(step, others)
