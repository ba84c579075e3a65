"""Sorting, selecting, scanning and counting: each input read once, each output written once.

An order cannot be known before every element was seen, so the input is read in whole even where one value comes out.
More passes (radix sort makes several) are a matter of the implementation. Comparisons are no FLOPs; a scan adds or
multiplies once for each element but the first of every row.
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.ops.cost import Cost, Part, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@formula(
    "aten._cummax_helper",
    "aten._cummin_helper",
    "aten.argsort",
    "aten.cummax",
    "aten.cummin",
    "aten.histc",
    "aten.kthvalue",
    "aten.median",
    "aten.mode",
    "aten.msort",
    "aten.nanmedian",
    "aten.sort",
    "aten.topk",
)
def order(op: Op) -> Cost:
    """The input read, every output written. Where nothing comes out (the top 0) nothing is read."""
    writes = accesses(*op.outputs, *(op.arguments[name] for name in op.mutated))
    return Cost(family="sorting", reads=accesses(op.tensor("self")) if writes else (), writes=writes)


@formula("aten.cumsum", "aten.cumsum_", "aten.cumprod", "aten.cumprod_", "aten.logcumsumexp", "aten._logcumsumexp")
def scan(op: Op) -> Cost:
    """Input read, output written; one operation for each element after the first of a row, in the output's dtype."""
    source, result = op.tensor("self"), op.outputs[0]
    flops: dict[str, float] = {}
    if result.is_floating and result.elements:
        length = source.shape[op.arguments["dim"]] if source.shape else 1
        dtype = "float64" if result.dtype == "float64" else "float32"
        flops[dtype] = float(result.elements - result.elements // length)
    return Cost(
        family="sorting",
        reads=accesses(source),
        writes=accesses(result),
        vector_flops={dtype: count for dtype, count in flops.items() if count},
    )


@formula("aten._unique", "aten._unique2", "aten.unique_consecutive", "aten.unique_dim", "aten.unique_dim_consecutive")
def unique(op: Op) -> Cost:
    """Input read; the distinct values written, and the inverse and the counts where they are asked for."""
    values, *others = op.outputs
    requested = [op.arguments.get("return_inverse"), op.arguments.get("return_counts")]
    wanted = [tensor for tensor, flag in zip(others, requested, strict=False) if flag]
    return Cost(family="sorting", reads=accesses(op.tensor("self")), writes=accesses(values, *wanted))


@formula("aten.searchsorted")
def search(op: Op) -> Cost:
    """Values read, places written, and one element of each sorted row: the least a search looks at."""
    values = op.arguments["self"]
    rows = op.tensor("sorted_sequence")
    return _search(op, values, replace(rows, shape=(*rows.shape[:-1], min(1, rows.shape[-1]))))


@formula("aten.bucketize")
def bucketize(op: Op) -> Cost:
    """As `search`, in one sorted row."""
    boundaries = op.tensor("boundaries")
    return _search(op, op.arguments["self"], replace(boundaries, shape=(min(1, boundaries.shape[0]),)))


def _search(op: Op, values: Tensor | float, least: Tensor) -> Cost:
    if not op.outputs[0].elements:
        return Cost(family="sorting")
    known = values if isinstance(values, Tensor) else None
    return Cost(family="sorting", reads=accesses(known, least), writes=accesses(*op.outputs))


@formula(
    "aten.bincount",
    "aten.histogram",
    "aten._histogramdd_bin_edges",
    "aten._histogramdd_from_bin_cts",
    "aten._histogramdd_from_bin_tensors",
)
def count(op: Op) -> Cost:
    """Values and, where there are any, their weights and bin edges read; the counts (and new edges) written."""
    others = op.tensors("weights", "weight", "bins")
    return Cost(
        family="sorting",
        reads=accesses(op.tensor("self"), *others),
        writes=accesses(*op.outputs),
    )


@formula("aten.isin")
def is_in(op: Op) -> Cost:
    """Elements read and one of those that they are looked for in, the least that a match takes; the answers written."""
    elements, candidates = op.arguments.get("elements"), op.arguments.get("test_elements")
    least: list[Part] = [elements] if isinstance(elements, Tensor) else []
    if isinstance(candidates, Tensor) and candidates.elements:
        least.append((candidates, candidates.item_bytes))
    return Cost(family="sorting", reads=accesses(*least), writes=accesses(*op.outputs))
