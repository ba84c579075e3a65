"""Reading by index: the indices, the least that they can select, and the result.

Which elements are selected is not known from shapes. Indices may repeat, so of a table the least is one row for all of
them together; a boolean mask selects every element at most once, so as many are read as come out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor

MASK_DTYPES = ("bool", "uint8")


def least_bytes(table: Tensor, fixed: Collection[int], shape: tuple[int, ...] | None = None) -> float:
    """The fewest bytes of `table` that an access touches which goes over `shape` and picks freely along `fixed`.

    Every place along the other dimensions is another element, so it is one slice. Where strides overlap two places
    may be the same element: one element then.
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


def share_bytes(table: Tensor, count: float, of: int) -> float:
    """The fewest bytes behind `count` different elements out of the `of` that `table` shows, expanded or broadcast."""
    return table.bytes * min(1.0, count / of) if of else 0.0


def indexed_dimensions(indices: tuple[Tensor | None, ...]) -> tuple[tuple[int, ...], bool]:
    """Which dimensions a list of indices picks from (a mask has as many as its own), and whether all are masks."""
    dimensions: list[int] = []
    position = 0
    masks = [index is not None and index.dtype in MASK_DTYPES for index in indices]
    for index, mask in zip(indices, masks, strict=True):
        width = len(index.shape) if index is not None and mask else 1
        if index is not None:
            dimensions.extend(range(position, position + width))
        position += width
    given = [mask for index, mask in zip(indices, masks, strict=True) if index is not None]
    return tuple(dimensions), bool(given) and all(given)


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

    With a padding index no row need be read, nor any weight of a sample. The other outputs are for the backward, and
    some are left empty.
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
    """Indices read, one element for each place across the other dimensions, the output written."""
    source, index = op.tensor("self"), op.tensor("index")
    if not source.shape or not index.shape:
        least = source.item_bytes if index.elements else 0.0
    else:
        least = least_bytes(source, (op.arguments["dim"],), index.shape)
    return Cost(family="indexing", reads=accesses(index, (source, least)), writes=accesses(*op.outputs))


@formula("aten.take")
def take(op: Op) -> Cost:
    """Indices read, one element read, the output written."""
    source, index = op.tensor("self"), op.tensor("index")
    least = source.item_bytes if index.elements else 0.0
    return Cost(family="indexing", reads=accesses(index, (source, least)), writes=accesses(*op.outputs))


@formula("aten.index", "aten._unsafe_index")
def index(op: Op) -> Cost:
    """Indices and masks read, the output written; by mask as much is read as comes out, by number one slice."""
    source, result = op.tensor("self"), op.outputs[0]
    indices: tuple[Tensor | None, ...] = tuple(op.arguments["indices"])
    dimensions, masks = indexed_dimensions(indices)
    if not result.elements:
        least = 0.0
    elif masks and least_bytes(source, ()) == source.bytes:
        least = share_bytes(source, result.elements, source.elements)
    else:
        least = least_bytes(source, dimensions)
    return Cost(family="indexing", reads=accesses(*indices, (source, least)), writes=accesses(result))


@formula("aten._unsafe_masked_index")
def masked_index(op: Op) -> Cost:
    """The mask read and the output written: where the mask is off neither index nor element is needed."""
    return Cost(family="indexing", reads=accesses(op.tensor("mask")), writes=accesses(*op.outputs))


@formula("aten.masked_select")
def masked_select(op: Op) -> Cost:
    """The mask read, of the tensor as much as comes out (less where it is broadcast to the mask), and that written."""
    source, mask, result = op.tensor("self"), op.tensor("mask"), op.outputs[0]
    width = max(len(source.shape), len(mask.shape))
    places = 1
    for one, other in zip(_padded(source.shape, width), _padded(mask.shape, width), strict=True):
        places *= other if one == 1 else one
    least = share_bytes(source, result.elements, places)
    if least_bytes(source, ()) < source.bytes:
        least = min(least, source.item_bytes)
    return Cost(family="indexing", reads=accesses(mask, (source, least)), writes=accesses(result))


def _padded(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    return (1,) * (width - len(shape)) + shape


@formula("aten.nonzero", "aten.nonzero_static", "aten.argwhere")
def nonzero(op: Op) -> Cost:
    """Every element read, the places written."""
    return Cost(family="indexing", reads=accesses(op.tensor("self")), writes=accesses(*op.outputs))
