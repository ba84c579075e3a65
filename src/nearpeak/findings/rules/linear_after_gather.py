"""A linear layer runs on rows that were repeated before it: before they are repeated, there are fewer of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.equal_values import EqualAlong, equal_along
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import dense_strides_like, gemm_op, seconds_by_size, share_left
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_PRODUCTS = {"aten.mm": ("self", "mat2"), "aten.addmm": ("mat1", "mat2")}
"""Products of rows with a weight, and the names of these arguments."""
_COPIES = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.repeat", "aten._unsafe_view")
MIN_REPEATS = 2.0
"""With fewer repetitions, the products are no shorter than the additions that come with them."""
_SUMS_BY_INDEX = ("aten.scatter_add", "aten.index_add")
_SCALES = ("aten.mul", "aten.div", "aten.clone", "aten._to_copy")
_NARROWER = 1.25
"""A layer that makes rows less narrow than this leaves about as much to be gathered and summed."""
_MAX_CHAIN = 4
"""So many ops of whole rows between the gather and the product are looked through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some columns of the rows that a product reads."""

    columns: int
    distinct: float
    """The number of rows before they were repeated."""
    gather: int | None
    """The op that repeats them; None where a view does, or nothing."""
    chain: tuple[int, ...] = ()
    """Ops on whole rows after it."""


@rule("linear-after-gather", needs=["storages"])
def linear_after_gather(step: Step) -> Iterator[Waste]:
    """Products of rows with a weight, where parts of the rows are gathered or expanded from fewer."""
    found = list(_repeated_rows(step))
    forward = {index for rows in found for index in rows.remaining}
    for rows in found:
        remaining = rows.remaining | _in_backward(step, rows, forward)
        gains = {index: seconds_by_size(step, index) * (1.0 - share) for index, share in remaining.items()}
        share_saved = share_left(gains.values())
        if not share_saved:
            continue
        gains = {index: max(0.0, gain) * share_saved for index, gain in gains.items()}
        adds = len(rows.parts) - 1
        repeated = [part for part in rows.parts if part.distinct * MIN_REPEATS <= rows.count]
        fewest = min(part.distinct for part in repeated)
        known = sum(part.columns for part in repeated)
        of_columns = "all columns" if known == rows.columns else f"{known} of {rows.columns} columns"
        yield Waste(
            title="A linear layer runs on rows that are repeated, each with the same result.",
            op=rows.product,
            gains=gains,
            replaces=True,
            evidence=f"{step.ops[rows.product].packet} of {rows.count} x {rows.columns} with {rows.columns} x "
            f"{rows.out_columns}: of its rows, {of_columns} are repeated from {fewest:.0f}, "
            f"{rows.count / fewest:.1f} times on average. With what repeats and joins them, and in backward, it took "
            f"{seconds(step.seconds(gains))}.",
            reasoning=f"On the rows before they are repeated, products take {rows.remaining[rows.product]:.0%} of the "
            "time; the results are repeated instead" + (", and those of the parts are added." if adds else "."),
            remedy=_remedy(adds),
        )
    yield from _narrowed_after_sums(step)


def _narrowed_after_sums(step: Step) -> Iterator[Waste]:
    """Products that make rows narrower after these were gathered and summed by index."""
    equal = equal_along(step)
    for index, op in enumerate(step.ops):
        if op.packet not in _PRODUCTS or op.phase != "forward" or op.recomputed or not step.time(index):
            continue
        rows, weight = (op.tensor(name) for name in _PRODUCTS[op.packet])
        if len(rows.shape) != 2 or not _is_weight(step, index, weight) or weight.shape[1] * _NARROWER > rows.shape[1]:
            continue
        summed = _summed(step, equal, index, rows)
        if summed is None:
            continue
        wide, path, source = summed
        (depth, columns), count = weight.shape, math.prod(source.shape[:-1])
        before = gemm_op(1, count, columns, depth, dtype=op.outputs[0].dtype, tf32=op.tf32_products)
        whole_s, before_s = step.expected(op), step.expected(before)
        left = {index: before_s / whole_s if whole_s and before_s else count / rows.shape[0]}
        left |= dict.fromkeys(step.derivatives.get(index, ()), left[index])
        for member in (*wide, *(other for first in wide for other in step.derivatives.get(first, ()))):
            left[member] = _narrower_share(step, step.ops[member], depth, columns)
        changes = {member: seconds_by_size(step, member) * (1.0 - share) for member, share in left.items()}
        if index in step.derivatives:  # then gradients go through the sums, also where none did before
            for member in path:
                if not step.derivatives.get(member):
                    changes[member] -= step.time(member) * columns / depth
        share_saved = share_left(changes.values())
        if not share_saved:
            continue
        took = step.seconds(left)
        yield Waste(
            title="Rows are gathered and summed before a linear layer makes them narrower.",
            op=index,
            gains={member: change * share_saved for member, change in changes.items() if change > 0.0},
            evidence=f"{op.packet} makes {columns} columns of {depth}, after rows of {depth} columns were gathered and "
            f"summed by index in {len(wide)} ops. With these, and in backward, it took {seconds(took)}.",
            reasoning="The layer of a sum is the sum of the layer: before the gather it runs on "
            f"{count:,} rows in place of {rows.shape[0]:,}, and {columns} of {depth} columns are left to be gathered "
            "and summed.",
            remedy="total = zeros.index_add(0, target, linear(x)[source])  # in place of linear(sums of x[source]),\n"
            "# where the layer makes rows narrower; its bias is added to the sums",
        )


def _narrower_share(step: Step, op: Op, depth: int, columns: int) -> float:
    """What is left of the time of an op on rows that have fewer columns: a sum by index may sort the indices first."""

    def narrower(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(narrower, value))
        if not isinstance(value, Tensor) or value.shape[-1:] != (depth,):
            return value
        shape = (*value.shape[:-1], columns)
        return dataclasses.replace(value, shape=shape, strides=dense_strides_like(value, shape))

    arguments = {name: narrower(value) for name, value in op.arguments.items()}
    whole_s = step.expected(op)
    less_s = step.expected(dataclasses.replace(op, arguments=arguments, outputs=narrower(op.outputs)))
    return min(1.0, less_s / whole_s) if whole_s and less_s else columns / depth


def _summed(step: Step, equal: EqualAlong, product: int, rows: Tensor) -> tuple[set[int], list[int], Tensor] | None:
    """The ops on whole rows that a product reads, back to what they were gathered from, if a sum by index is among
    them; those on the way to it; and what they were gathered from."""
    wide, path, index, tensor, sums = set[int](), list[int](), product, rows, 0
    while True:
        producer = step.flow.producers[index].get(tensor.storage)
        if producer is None or not _is_read_by(step, producer, wide | {product}):
            return None
        op, width = step.ops[producer], rows.shape[1]
        if op.recomputed or not op.written or op.written[0].shape[-1:] != (width,):
            return None
        wide.add(producer)
        path.append(producer)
        if sums and (source := _gathered(op)) is not None:
            return wide, path, source
        if op.packet.rstrip("_") in _SUMS_BY_INDEX:
            start = step.flow.producers[producer].get(op.tensor("self").storage)
            index_tensor = op.tensor("index")
            at = next(place for place, item in enumerate(op.inputs) if item is index_tensor)
            is_of_rows = op.arguments["dim"] == 0 and (
                len(index_tensor.shape) == 1 or len(index_tensor.shape) - 1 in equal.read[producer][at]
            )
            if not is_of_rows or start is None or step.costs[start].family != "creation":
                return None
            sums += 1
            wide.add(start)
            inside = op.arguments.get("src", op.arguments.get("source"))
        else:
            inside = _scaled(step, equal, producer, wide)
        if not isinstance(inside, Tensor) or inside.shape[-1:] != (width,):
            return None
        index, tensor = producer, inside


def _scaled(step: Step, equal: EqualAlong, index: int, wide: set[int]) -> Tensor | None:
    """The rows that an op copies, or multiplies each with a number of its own; what makes the numbers as wide as the
    rows is added to the ops on whole rows."""
    op = step.ops[index]
    if op.packet.rstrip("_") not in _SCALES:
        return None
    whole = op.inputs[0]
    if whole.elements != op.written[0].elements:
        return None
    for tensor, dims in zip(op.inputs[1:], equal.read[index][1:], strict=True):
        if tensor.shape[-1:] not in ((), (1,)) and len(tensor.shape) - 1 not in dims:
            return None
        waiting = [(index, tensor.storage)]
        while waiting:
            reader, storage = waiting.pop()
            producer = step.flow.producers[reader].get(storage)
            if producer is None or producer in wide or not _is_read_by(step, producer, wide):
                continue
            made = step.ops[producer].written[0]
            if len(made.shape) - 1 in equal.written[producer] and made.shape[-1:] == whole.shape[-1:]:
                wide.add(producer)
                waiting += [(producer, item.storage) for item in step.ops[producer].inputs]
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of which some are repeated, and the product that reads them."""

    product: int
    count: int
    columns: int
    out_columns: int
    parts: Sequence[_Part]
    remaining: dict[int, float]
    """The share of the time of each op that is left."""


def _repeated_rows(step: Step) -> Iterator[_Rows]:
    for index, op in enumerate(step.ops):
        if op.packet not in _PRODUCTS or op.phase != "forward" or op.recomputed or not step.time(index):
            continue
        rows, weight = (op.tensor(name) for name in _PRODUCTS[op.packet])
        if len(rows.shape) != 2 or len(weight.shape) != 2 or not _is_weight(step, index, weight):
            continue
        count, out_columns = rows.shape[0], weight.shape[1]
        joined, parts = _parts(step, index, rows)
        repeated = [part for part in parts if part.distinct * MIN_REPEATS <= count]
        if not repeated:
            continue
        remaining = {index: _product_share(step, op, count, parts, out_columns)}
        alone = {index, *([joined] if joined is not None else ()), *(i for part in parts for i in part.chain)}
        for part in repeated:
            if part.gather is not None and _is_read_by(step, part.gather, alone):
                remaining[part.gather] = out_columns / part.columns
            for between in part.chain:
                if _is_read_by(step, between, alone):
                    remaining[between] = part.distinct / count
        if joined is not None and _is_read_by(step, joined, alone):
            took = step.time(joined)
            remaining[joined] = _additions_seconds(step, op.outputs[0], parts) / took if took else 1.0
        yield _Rows(
            product=index,
            count=count,
            columns=rows.shape[1],
            out_columns=out_columns,
            parts=parts,
            remaining=remaining,
        )


def _product_share(step: Step, op: Op, count: int, parts: Sequence[_Part], out_columns: int) -> float:
    """What products of the parts take of the time of a product in forward or backward, as good kernels take it."""
    made = op.outputs[0]
    over_rows = made.shape[0] != count  # the gradient of the weight
    gemms = []
    for part in parts:
        rows = max(1, int(part.distinct))
        m, n, k = (out_columns, part.columns, rows) if over_rows else (rows, out_columns, part.columns)
        gemms.append(gemm_op(1, m, n, k, dtype=made.dtype, tf32=op.tf32_products))
    whole_s, parts_s = step.expected(op), sum(step.expected(gemm) or 0.0 for gemm in gemms)
    if whole_s and parts_s:
        return parts_s / whole_s
    return sum(part.distinct * part.columns for part in parts) / (count * sum(part.columns for part in parts))


def _bias_share(step: Step, op: Op, parts: Sequence[_Part]) -> float:
    """What is left of the sum of gradients over rows where the layer of the fewest rows has the bias."""
    (rows,), (bias,) = op.inputs, op.outputs
    fewest, columns = max(1, int(min(part.distinct for part in parts))), rows.shape[1]
    few = Tensor(shape=(fewest, columns), strides=(columns, 1), dtype=rows.dtype, storage=rows.storage)
    shorter = Op(name=op.name, arguments={**op.arguments, "self": few}, outputs=(bias,))
    whole_s, few_s = step.expected(op), step.expected(shorter)
    return few_s / whole_s if whole_s and few_s else fewest / rows.shape[0]


def _additions_seconds(step: Step, sums: Tensor, parts: Sequence[_Part]) -> float:
    """The time in which the results of parts are added: each addition reads a sum and a part, and writes a sum.

    A part that is expanded has few rows to be read.
    """
    count, columns = sums.shape
    last = max(step.trace.storages, default=0)
    total_s = 0.0
    for part in sorted(parts, key=lambda part: -part.distinct)[1:]:
        few = part.gather is None and part.distinct * MIN_REPEATS <= count
        groups = max(1, int(part.distinct)) if few else count
        shape, dense = (groups, count // groups, columns), (count // groups * columns, columns, 1)
        tensors = [
            Tensor(shape=shape, strides=strides, dtype=sums.dtype, storage=last + number)
            for number, strides in enumerate((dense, (columns, 0, 1) if few else dense, dense), 1)
        ]
        arguments = {"self": tensors[0], "other": tensors[1], "alpha": 1}
        addition = Op(name="aten.add.Tensor", arguments=arguments, outputs=(tensors[2],))
        total_s += step.expected(addition) or 0.0
    return total_s


def _remedy(adds: int) -> str:
    if not adds:
        return "y = linear(x)[index]  # or linear(x).repeat_interleave(...): before the rows are repeated"
    return (
        "y = linear_a(x)[index] + linear_b(x)[:, None] + linear_c(edges)  # one layer for each part, before it is "
        "repeated,\n# in place of linear(torch.cat([x[index], x.expand(...), edges], dim=-1)); one of them has the bias"
    )


def _is_weight(step: Step, index: int, weight: Tensor) -> bool:
    """Whether a factor does not depend on the rows: it is older than the step, or a cast of such a tensor."""
    producer = step.flow.producers[index].get(weight.storage)
    if producer is None:
        return True
    op = step.ops[producer]
    return op.packet == "aten._to_copy" and op.inputs[0].storage not in step.flow.producers[producer]


def _is_read_by(step: Step, index: int, readers: set[int]) -> bool:
    """Whether the results of an op are read in forward by some ops alone."""
    return readers.issuperset(step.forward_readers(index)) and not any(
        tensor.storage in step.flow.results for tensor in step.ops[index].outputs
    )


def _parts(step: Step, index: int, rows: Tensor) -> tuple[int | None, list[_Part]]:
    """The op that joins columns to the rows that an op reads, if there is one, and these columns."""
    producer = step.flow.producers[index].get(rows.storage)
    op = None if producer is None else step.ops[producer]
    if op is None or producer is None or op.packet != "aten.cat" or not _joins_columns(op):
        return None, [_part(step, index, rows)]
    return producer, [_part(step, producer, tensor) for tensor in op.tensors("tensors")]


def _joins_columns(op: Op) -> bool:
    dimensions = len(op.outputs[0].shape)
    return op.arguments.get("dim") in (-1, dimensions - 1)


def _part(step: Step, index: int, tensor: Tensor) -> _Part:
    """How often the rows of a tensor that an op reads are repeated."""
    columns = tensor.shape[-1]
    chain: list[int] = []
    for _ in range(_MAX_CHAIN):
        if 0 in tensor.strides[:-1] and (distinct := _unexpanded_rows(tensor)) < tensor.elements / columns:
            return _Part(columns=columns, distinct=distinct, gather=None, chain=tuple(chain))
        producer = step.flow.producers[index].get(tensor.storage)
        if producer is None:
            break
        op = step.ops[producer]
        source = _gathered(op)
        if source is not None and op.outputs[0].shape[-1] == columns:
            distinct = _unexpanded_rows(source)
            return _Part(columns=columns, distinct=distinct, gather=producer, chain=tuple(chain))
        inside = _row_input(step, producer)
        if inside is None:
            break
        chain.append(producer)
        index, tensor = producer, inside
    return _Part(columns=columns, distinct=tensor.elements / max(1, tensor.shape[-1]), gather=None)


def _unexpanded_rows(tensor: Tensor) -> float:
    """The number of rows of a tensor without those that an expanded dimension repeats."""
    return float(math.prod(size for size, stride in zip(tensor.shape[:-1], tensor.strides[:-1], strict=True) if stride))


def _gathered(op: Op) -> Tensor | None:
    """The tensor whose whole rows an op repeats."""
    if op.packet == "aten.embedding":
        return op.tensor("weight")
    if not op.inputs or not op.outputs or not op.inputs[0].shape or not op.outputs[0].shape:
        return None
    source = op.inputs[0]
    if op.packet == "aten.index_select":
        dimensions = len(source.shape)
        return source if op.arguments.get("dim") not in (-1, dimensions - 1) else None
    if op.packet == "aten.index" and source.shape[-1] == op.outputs[0].shape[-1]:
        indices = op.arguments.get("indices") or ()
        return source if len(indices) < len(source.shape) else None
    if op.packet in _COPIES and source.shape[-1] == op.outputs[0].shape[-1]:
        return source if 0 in source.strides[:-1] or op.packet == "aten.repeat" else None
    return None


def _row_input(step: Step, index: int) -> Tensor | None:
    """The one tensor from which an op computes each row by itself; None if it is no such op."""
    op = step.ops[index]
    if not op.outputs or op.mutated:
        return None
    whole = [tensor for tensor in op.inputs if tensor.elements == op.outputs[0].elements]
    others = [tensor for tensor in op.inputs if tensor.elements > op.outputs[0].shape[-1] and tensor not in whole]
    if len(whole) != 1 or others:
        return None
    by_rows = step.costs[index].family == "pointwise" or op.packet == "aten.native_layer_norm"
    return whole[0] if by_rows and whole[0].shape[-1:] == op.outputs[0].shape[-1:] else None


def _sums_rows(op: Op, rows: _Rows) -> bool:
    """Whether an op adds up the gradients of a product's results, which is the gradient of its bias."""
    summed = op.packet == "aten.sum" and len(op.inputs) == len(op.outputs) == 1
    return (
        summed and op.inputs[0].shape == (rows.count, rows.out_columns) and op.outputs[0].elements == rows.out_columns
    )


def _in_backward(step: Step, rows: _Rows, others: Collection[int]) -> dict[int, float]:
    """What is left of the backward ops of some ops, which are at their lines, and products or not as they are."""

    def key_of(index: int) -> tuple[str, str, bool]:
        op = step.ops[index]
        return op.source, op.module, step.costs[index].family == "matrix"

    shares = {key_of(index): share for index, share in rows.remaining.items() if step.ops[index].source}
    mixed = {
        key_of(index)
        for index, op in enumerate(step.ops)
        if op.phase == "forward" and index not in others and step.time(index)
    }
    left = {}
    for index, op in enumerate(step.ops):
        if op.phase != "backward" or op.recomputed:
            continue
        if _sums_rows(op, rows) and (op.source, op.module) == (
            step.ops[rows.product].source,
            step.ops[rows.product].module,
        ):
            left[index] = _bias_share(step, op, rows.parts)
            continue
        if (key := key_of(index)) not in shares or key in mixed:
            continue
        is_product = op.packet in _PRODUCTS and len(op.outputs[0].shape) == 2
        left[index] = _product_share(step, op, rows.count, rows.parts, rows.out_columns) if is_product else shares[key]
    return left
