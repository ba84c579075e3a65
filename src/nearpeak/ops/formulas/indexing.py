"""Reading and writing by index.

Reading: the indices, the least that they can select, and the result. Which elements are selected is not known from
shapes. Indices may repeat, so one row of a table for all of them together is the least; a boolean mask selects every
element at most once, so as many elements are read as are written.

Writing: the indices, the values, and the least of the destination that they can select. In place, only selected
elements are touched. Indices may repeat, and repeated writes meet in a cache, so the least of the destination is one
slice for all indices together: written, and also read where values are added. Which of two values for one element wins
is undefined, but every index has to be read, and kernels then read its value too. Out of place, the whole result is
written, and of the old tensor at least what the values cannot cover is read; all of it where values are added.

The gradient of `gather` is `scatter_add`, that of `index` is `index_put`: autograd adds into new zeros in place, but
under a trace it calls the out-of-place form, which is therefore charged as in place wherever it adds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from nearpeak.ops.cost import Cost, accesses, formula, least_bytes
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

MASK_DTYPES = ("bool", "uint8")


def share_bytes(table: Tensor, count: float, of: int) -> float:
    """The fewest bytes of `count` different elements out of the `of` elements of `table`, expanded or broadcast."""
    return table.bytes * min(1.0, count / of) if of else 0.0


def indexed_dimensions(indices: tuple[Tensor | None, ...]) -> tuple[tuple[int, ...], bool]:
    """The dimensions that a list of indices selects from (a mask has several), and whether all indices are masks."""
    dimensions: list[int] = []
    position = 0
    masks = [index is not None and index.dtype in MASK_DTYPES for index in indices]
    for index, mask in zip(indices, masks, strict=True):
        width = len(index.shape) if index is not None and mask else 1
        if index is not None:
            dimensions.extend(range(position, position + width))
        position += width
    flags = [mask for index, mask in zip(indices, masks, strict=True) if index is not None]
    return tuple(dimensions), bool(flags) and all(flags)


@formula("aten.embedding")
def embedding(op: Op) -> Cost:
    """Indices read, at least one row of the table read, the output written."""
    table, indices = op.tensor("weight"), op.tensor("indices")
    row = least_bytes(table, (0,)) if indices.elements else 0.0
    return Cost(family="indexing", reads=accesses(indices, (table, row)), writes=accesses(*op.outputs))


@formula("aten.embedding_dense_backward")
def embedding_dense_backward(op: Op) -> Cost:
    """Indices and gradient read, the gradient of the whole table written.

    With a padding index the rows of the gradient that have it are not needed, and all of them may have it.
    """
    gradient = None if op.arguments["padding_idx"] >= 0 else op.tensor("grad_output")
    return Cost(family="indexing", reads=accesses(op.tensor("indices"), gradient), writes=accesses(*op.outputs))


@formula("aten.embedding_renorm_")
def embedding_renorm(op: Op) -> Cost:
    """Indices and one row read; rows within the norm are not written."""
    table, indices = op.tensor("self"), op.tensor("indices")
    row = least_bytes(table, (0,)) if indices.elements else 0.0
    return Cost(family="indexing", reads=accesses(indices, (table, row)))


@formula("aten.embedding_renorm")
def embedding_renorm_copy(op: Op) -> Cost:
    """As `embedding_renorm_`, into a copy of the table."""
    return Cost(
        family="indexing", reads=accesses(op.tensor("indices"), op.tensor("self")), writes=accesses(*op.outputs)
    )


@formula("aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(op: Op) -> Cost:
    """Indices and offsets read, one row of the table, and the bags written.

    With a padding index, neither a row nor the weight of a sample has to be read. The other outputs are for the
    backward pass, and some stay empty.
    """
    table, indices = op.tensor("weight"), op.tensor("indices")
    padding = op.arguments.get("padding_idx")
    row = 0.0 if (padding is not None and padding >= 0) or not indices.elements else least_bytes(table, (0,))
    return Cost(
        family="indexing",
        reads=accesses(indices, op.tensor("offsets"), (table, row)),
        writes=accesses(op.outputs[0]),
    )


@formula(
    "aten._embedding_bag_backward",
    "aten._embedding_bag_dense_backward",
    "aten._embedding_bag_per_sample_weights_backward",
)
def embedding_bag_backward(op: Op) -> Cost:
    """Indices read, at least one bag of the gradient, and the result written unless it is sparse."""
    gradient, indices = op.tensor("grad"), op.tensor("indices")
    bag = 0.0 if op.arguments["padding_idx"] >= 0 or not indices.elements else least_bytes(gradient, (0,))
    writes = () if op.arguments.get("sparse") else op.outputs
    return Cost(family="indexing", reads=accesses(indices, (gradient, bag)), writes=accesses(*writes))


@formula("aten.index_select")
def index_select(op: Op) -> Cost:
    """Indices read, one slice read, the output written."""
    source, index = op.tensor("self"), op.tensor("index")
    piece = least_bytes(source, (op.arguments["dim"],) if source.shape else ()) if index.elements else 0.0
    return Cost(family="indexing", reads=accesses(index, (source, piece)), writes=accesses(*op.outputs))


@formula("aten.gather")
def gather(op: Op) -> Cost:
    """Indices read, one element for each position along the other dimensions, the output written."""
    source, index = op.tensor("self"), op.tensor("index")
    if not source.shape or not index.shape:
        read_bytes = source.item_bytes if index.elements else 0.0
    else:
        read_bytes = least_bytes(source, (op.arguments["dim"],), index.shape)
    return Cost(family="indexing", reads=accesses(index, (source, read_bytes)), writes=accesses(*op.outputs))


@formula("aten.take")
def take(op: Op) -> Cost:
    """Indices read, one element read, the output written."""
    source, index = op.tensor("self"), op.tensor("index")
    read_bytes = source.item_bytes if index.elements else 0.0
    return Cost(family="indexing", reads=accesses(index, (source, read_bytes)), writes=accesses(*op.outputs))


@formula("aten.index", "aten._unsafe_index")
def index(op: Op) -> Cost:
    """Indices and masks read, the output written; as much read as written for a mask, one slice for indices."""
    source, result = op.tensor("self"), op.outputs[0]
    indices: tuple[Tensor | None, ...] = tuple(op.arguments["indices"])
    dimensions, masks = indexed_dimensions(indices)
    if not result.elements:
        read_bytes = 0.0
    elif masks and least_bytes(source, ()) == source.bytes:
        read_bytes = share_bytes(source, result.elements, source.elements)
    else:
        read_bytes = least_bytes(source, dimensions)
    return Cost(family="indexing", reads=accesses(*indices, (source, read_bytes)), writes=accesses(result))


@formula("aten._unsafe_masked_index")
def masked_index(op: Op) -> Cost:
    """The mask read and the output written: where the mask is off neither index nor element is needed."""
    return Cost(family="indexing", reads=accesses(op.tensor("mask")), writes=accesses(*op.outputs))


@formula("aten.masked_select")
def masked_select(op: Op) -> Cost:
    """The mask read, as much of the tensor as is selected (less where it is broadcast), and the selection written."""
    source, mask, result = op.tensor("self"), op.tensor("mask"), op.outputs[0]
    width = max(len(source.shape), len(mask.shape))
    positions = 1
    for size, mask_size in zip(_padded(source.shape, width), _padded(mask.shape, width), strict=True):
        positions *= mask_size if size == 1 else size
    read_bytes = share_bytes(source, result.elements, positions)
    if least_bytes(source, ()) < source.bytes:
        read_bytes = min(read_bytes, source.item_bytes)
    return Cost(family="indexing", reads=accesses(mask, (source, read_bytes)), writes=accesses(result))


def _padded(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    return (1,) * (width - len(shape)) + shape


@formula("aten.nonzero", "aten.nonzero_static", "aten.argwhere")
def nonzero(op: Op) -> Cost:
    """Every element read, the positions written."""
    return Cost(family="indexing", reads=accesses(op.tensor("self")), writes=accesses(*op.outputs))


def scattered(
    op: Op,
    *,
    reads: tuple[Tensor | None, ...],
    smallest: float,
    largest: float,
    accumulate: bool,
    additions: float = 0.0,
) -> Cost:
    """The cost of a write by index that selects at least `smallest` and at most `largest` bytes of `self`."""
    target, result = op.tensor("self"), op.outputs[0]
    flops: dict[str, float] = {}
    if additions and result.is_floating:
        flops["float64" if result.dtype == "float64" else "float32"] = float(additions)
    if target == result or (accumulate and op.packet == "aten.index_put"):
        smallest = min(smallest, target.bytes)
        old_bytes, written = (smallest if accumulate else 0.0), smallest
    else:
        old_bytes, written = (target.bytes if accumulate else max(0.0, target.bytes - largest)), result.bytes
    return Cost(
        family="indexing",
        reads=accesses(*reads, (target, old_bytes)),
        writes=accesses((result, written)),
        vector_flops=flops,
    )


def _along(op: Op) -> tuple[int, ...]:
    return (op.arguments["dim"],) if op.tensor("self").shape else ()


def _slice_elements(op: Op) -> int:
    """Elements of one slice of `self` across `dim`."""
    target = op.tensor("self")
    return target.elements // max(1, target.shape[op.arguments["dim"]]) if target.shape else 1


@formula(
    "aten.scatter",
    "aten.scatter_",
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
)
def scatter(op: Op) -> Cost:
    """Indices and as many values read; one element of the destination for each position across `dim`."""
    target, index = op.tensor("self"), op.tensor("index")
    source = op.arguments.get("src")
    values = source if isinstance(source, Tensor) else None
    if values is not None and len(values.shape) == len(index.shape):
        values = replace(values, shape=index.shape)  # the rest of a larger source is not read
    reduce = "sum" if "scatter_add" in op.name else op.arguments.get("reduce")
    accumulate = reduce is not None and op.arguments.get("include_self", True)
    shape = index.shape if len(index.shape) == len(target.shape) else (index.elements,) * len(target.shape)
    return scattered(
        op,
        reads=(index, values),
        smallest=least_bytes(target, _along(op), shape) if index.elements else 0.0,
        largest=index.elements * target.item_bytes,
        accumulate=bool(accumulate),
        additions=index.elements if accumulate and reduce in ("sum", "add", "prod", "multiply") else 0.0,
    )


@formula(
    "aten.index_add",
    "aten.index_add_",
    "aten.index_copy",
    "aten.index_copy_",
    "aten.index_reduce",
    "aten.index_reduce_",
)
def index_write(op: Op) -> Cost:
    """Indices and values read; one slice of the destination."""
    target, index, values = op.tensor("self"), op.tensor("index"), op.tensor("source")
    adds = op.packet.startswith("aten.index_add")
    accumulate = adds or (op.packet.startswith("aten.index_reduce") and op.arguments["include_self"])
    return scattered(
        op,
        reads=(index, values),
        smallest=least_bytes(target, _along(op)) if index.elements else 0.0,
        largest=values.elements * target.item_bytes,
        accumulate=bool(accumulate),
        additions=values.elements if adds else 0.0,
    )


@formula("aten.index_fill", "aten.index_fill_")
def index_fill(op: Op) -> Cost:
    """Indices read, and the value where it is a tensor; one slice of the destination."""
    target, index, value = op.tensor("self"), op.tensor("index"), op.arguments["value"]
    piece = least_bytes(target, _along(op)) if index.elements else 0.0
    return scattered(
        op,
        reads=(index, value if isinstance(value, Tensor) else None),
        smallest=piece,
        largest=_slice_elements(op) * index.elements * target.item_bytes,
        accumulate=False,
    )


@formula("aten.index_put", "aten.index_put_", "aten._index_put_impl", "aten._index_put_impl_", "aten._unsafe_index_put")
def index_put(op: Op) -> Cost:
    """Indices and values read; one slice of the destination, or for a mask as many elements as there are values.

    A value that is broadcast over a mask does not tell how many elements are set. In place that may be none; out of
    place it may be all, so that no old element is read.
    """
    target, values = op.tensor("self"), op.tensor("values")
    indices: tuple[Tensor | None, ...] = tuple(op.arguments["indices"])
    dimensions, masks = indexed_dimensions(indices)
    present = [index for index in indices if index is not None]
    accumulate = bool(op.arguments["accumulate"])
    rest = [size for number, size in enumerate(target.shape) if number not in dimensions]
    read: Tensor | None = values
    if any(index.dtype in MASK_DTYPES for index in present):
        count_known = masks and len(indices) == 1 and len(values.shape) == 1 + len(rest) and values.shape[0] > 1
        count = values.shape[0] * math.prod(rest) if count_known else 0
        smallest = count * target.item_bytes
        largest = smallest if count_known else target.bytes
        read = values if count_known else None
    else:
        positions = math.prod(_broadcast_shape([index.shape for index in present]))
        count = positions * math.prod(rest)
        smallest = least_bytes(target, dimensions) if count else 0.0
        largest = count * target.item_bytes
    return scattered(
        op,
        reads=(*indices, read),
        smallest=smallest,
        largest=largest,
        accumulate=accumulate,
        additions=count if accumulate else 0.0,
    )


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> list[int]:
    width = max((len(shape) for shape in shapes), default=0)
    aligned = [(1,) * (width - len(shape)) + shape for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)]


@formula("aten.put", "aten.put_")
def put(op: Op) -> Cost:
    """Indices and values read; one element of the destination."""
    target, index, values = op.tensor("self"), op.tensor("index"), op.tensor("source")
    accumulate = bool(op.arguments["accumulate"])
    return scattered(
        op,
        reads=(index, values),
        smallest=target.item_bytes if index.elements else 0.0,
        largest=index.elements * target.item_bytes,
        accumulate=accumulate,
        additions=index.elements if accumulate else 0.0,
    )


@formula("aten._unsafe_masked_index_put_accumulate")
def masked_index_put(op: Op) -> Cost:
    """The mask and the old tensor read, the result written; where the mask is off no value is needed."""
    return scattered(op, reads=(op.tensor("mask"),), smallest=0.0, largest=0.0, accumulate=True)


@formula("aten.segment_reduce")
def segment_reduce(op: Op) -> Cost:
    """Lengths or offsets read, the data where the lengths cover all of it, the result written."""
    data, lengths = op.tensor("data"), op.tensors("lengths")
    covered = bool(lengths) and not op.arguments.get("unsafe")
    counts = op.tensors("lengths", "indices", "offsets")
    return Cost(family="reduction", reads=accesses(*counts, data if covered else None), writes=accesses(*op.outputs))


@formula("aten._segment_reduce_backward")
def segment_reduce_backward(op: Op) -> Cost:
    """Lengths or offsets and the gradient read, that of the data written, zeros included."""
    counts = op.tensors("lengths", "offsets")
    return Cost(family="reduction", reads=accesses(*counts, op.tensor("grad")), writes=accesses(*op.outputs))


@formula("aten.masked_scatter", "aten.masked_scatter_")
def masked_scatter(op: Op) -> Cost:
    """The mask read and, out of place, for each element either the old or the next of the source; the result written.

    How many come from the source is not known. If the source's elements are distinct in memory, the sum does not depend
    on it and is charged to the old tensor. In place, only the mask is certain to be read.
    """
    source = op.tensor("source")
    expanded = source.bytes < source.elements * source.item_bytes
    return scattered(
        op,
        reads=(op.tensor("mask"),),
        smallest=0.0,
        largest=source.elements * source.item_bytes if expanded else 0.0,
        accumulate=False,
    )


@formula("aten.masked_scatter_backward")
def masked_scatter_backward(op: Op) -> Cost:
    """The mask read and the result written, zeros included; how much of the gradient is selected is not known."""
    return Cost(family="indexing", reads=accesses(op.tensor("mask")), writes=accesses(*op.outputs))


@formula("aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter", "aten.as_strided_scatter")
def view_scatter(op: Op) -> Cost:
    """Values read, the rest of the old tensor read, the result written."""
    source, target = op.tensor("src"), op.tensor("self")
    return scattered(
        op, reads=(source,), smallest=source.bytes, largest=source.elements * target.item_bytes, accumulate=False
    )
