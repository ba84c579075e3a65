"""Three factors are multiplied in the order that takes more work: (A @ B) @ C is A @ (B @ C)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import gemm_op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.matmul")
_SUMS = ("aten.addmm", "aten.baddbmm")
_SCALINGS = ("aten.mul", "aten.div", "aten.neg", "aten._to_copy", "aten.clone", "aten._unsafe_view")
"""Ops with a number, and copies, that the order of products does not mind."""
_MAX_SCALINGS = 4
_LEAST_SAVED = 0.2
"""Of the time of both products. A smaller saving is within the variation of kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Two products, of which the second reads what the first one writes, and nothing else does."""

    first: int
    second: int
    between: tuple[int, ...]
    batch: int
    old: tuple[tuple[int, int, int], tuple[int, int, int]]
    """Rows, columns and the sum of each product."""
    new: tuple[tuple[int, int, int], tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Of both products in either order."""

    old_s: float
    new_s: float


@rule("product-order", needs=["storages"])
def product_order(step: Step) -> Iterator[Waste]:
    """Products of a product, where the third factor could be multiplied with one of the others first."""
    taken: set[int] = set()
    for index, op in enumerate(step.ops):
        chain = _chain(step, index) if op.packet in _PRODUCTS and op.phase == "forward" and index not in taken else None
        if chain is None:
            continue
        times = _times(step, chain)
        if times is None or times.new_s > (1 - _LEAST_SAVED) * times.old_s:
            continue
        share = times.new_s / times.old_s
        products = [chain.first, chain.second, *_backward(step, chain)]
        small = _smaller_share(chain)
        gains = {i: step.time(i) * (1 - share) for i in products}
        gains |= {i: step.time(i) * (1 - small) for i in chain.between if small < 1 and step.time(i)}
        taken |= {chain.first, chain.second}
        middle = step.ops[chain.first].outputs[0]
        flops = [2 * chain.batch * sum(m * n * k for m, n, k in order) for order in (chain.old, chain.new)]
        yield Waste(
            title="Three factors are multiplied in the order that takes more work.",
            op=chain.first if step.time(chain.first) >= step.time(chain.second) else chain.second,
            gains=gains,
            evidence=f"{step.ops[chain.first].packet} makes {shape_text(middle.shape)}, which only "
            f"{step.ops[chain.second].packet} at {step.ops[chain.second].source or 'a later line'} reads: "
            f"{len(products)} products take {seconds(step.seconds(products))}.",
            reasoning=f"In the other order, {flops[1] / flops[0]:.1%} of the operations are left, which take "
            f"{share:.0%} of the time.",
            remedy="y = A @ (B @ C)  # in place of (A @ B) @ C; torch.linalg.multi_dot([A, B, C]) chooses the order\n"
            "# attention without softmax: q @ (k.mT @ v), in place of (q @ k.mT) @ v",
        )


def _chain(step: Step, first: int) -> _Chain | None:
    """The product that alone reads a product, and what both are in the other order."""
    sizes = product_sizes(step.ops[first])
    op = step.ops[first]
    if sizes is None or op.recomputed or op.packet in _SUMS:
        return None
    batch, m, n, k = sizes
    index, between = first, []
    middle = op.outputs[0]
    for _ in range(_MAX_SCALINGS):
        readers = step.forward_readers(index)
        if len(readers) != 1 or step.flow.results.intersection(step.flow.written_by[index]):
            return None
        (reader,) = readers
        following = step.ops[reader]
        if following.packet in _PRODUCTS:
            break
        if (
            following.packet not in _SCALINGS
            or following.mutated
            or len([t for t in following.inputs if t.elements > 1]) > 1
        ):
            return None
        between.append(reader)
        index, middle = reader, following.outputs[0]
        if middle.elements != batch * m * n:
            return None
    else:
        return None
    return _with_third(step, first, reader, tuple(between), middle, (batch, m, n, k))


def _with_third(
    step: Step, first: int, second: int, between: tuple[int, ...], middle: Tensor, sizes: tuple[int, int, int, int]
) -> _Chain | None:
    batch, m, n, k = sizes
    op, later = step.ops[second], product_sizes(step.ops[second])
    if later is None or later[0] != batch:
        return None
    factors = [op.arguments.get(name) for name in FACTORS[op.packet]]
    ours = [
        place for place, factor in enumerate(factors) if isinstance(factor, Tensor) and factor.storage == middle.storage
    ]
    if len(ours) != 1 or len(middle.shape) < 2:
        return None
    (place,) = ours
    factor = factors[place]
    assert isinstance(factor, Tensor)
    if factor.elements != batch * m * n or len(factor.shape) < 2:
        return None
    _, rows, columns, summed = later
    others = columns if place == 0 else rows
    summed_stride = factor.strides[-1] if place == 0 else factor.strides[-2]
    over_columns = summed_stride == middle.strides[-1]
    if summed != (n if over_columns else m) or (middle.shape[-2], middle.shape[-1]) != (m, n):
        return None
    old = ((m, n, k), (m, others, n) if over_columns else (n, others, m))
    new = ((k, others, n), (m, others, k)) if over_columns else ((k, others, m), (n, others, k))
    return _Chain(first=first, second=second, between=between, batch=batch, old=old, new=new)


def _times(step: Step, chain: _Chain) -> _Times | None:
    op = step.ops[chain.first]
    dtype, tf32 = op.outputs[0].dtype, op.tf32_products

    def total(order: tuple[tuple[int, int, int], ...]) -> float | None:
        times = [step.expected(gemm_op(chain.batch, m, n, k, dtype=dtype, tf32=tf32)) for m, n, k in order]
        return None if None in times else sum(time or 0.0 for time in times)

    old_s, new_s = total(chain.old), total(chain.new)
    return _Times(old_s=old_s, new_s=new_s) if old_s and new_s is not None else None


def _smaller_share(chain: _Chain) -> float:
    """What is left of the elements between both products."""
    (m, n, _), (k, others, _) = chain.old[0], chain.new[0]
    return k * others / (m * n)


def _backward(step: Step, chain: _Chain) -> list[int]:
    """The products of the backward pass of both, by their lines and sizes."""
    sizes = {(chain.batch, *sorted(product)) for product in chain.old}
    lines = {(step.ops[i].source, step.ops[i].module) for i in (chain.first, chain.second)}
    found = []
    for index, op in enumerate(step.ops):
        if op.phase != "backward" or op.packet not in _PRODUCTS or (op.source, op.module) not in lines:
            continue
        own = product_sizes(op)
        if own is not None and (own[0], *sorted(own[1:])) in sizes:
            found.append(index)
    return found
