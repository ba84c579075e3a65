"""Data movement: the source is read once, the result is written once, and nothing is computed.

A destination is not read. A cast reads in one dtype and writes in the other. Only what reaches the result is read: a
copy of a slice reads the slice, a crop the part that is left, `tril` its triangle. Copies that repeat
elements (`repeat`, `expand_copy`, padding by reflection) read each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from nearpeak.ops.cost import Cost, Part, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

COPIES_OF_VIEWS = """
    aten._conj_copy aten._fw_primal_copy aten._neg_view_copy aten._reshape_alias_copy aten._reshape_copy
    aten.alias_copy aten.detach_copy aten.diagonal_copy aten.expand_copy aten._make_dual_copy
    aten.lift_fresh_copy aten.narrow_copy aten.permute_copy aten.select_copy aten.slice_copy aten.split_copy
    aten.split_with_sizes_copy aten.squeeze_copy aten.t_copy aten.transpose_copy aten.unbind_copy
    aten.unsqueeze_copy aten.view_as_complex_copy aten.view_as_real_copy aten.view_copy
""".split()


def moved(reads: Iterable[Part], writes: Iterable[Tensor]) -> Cost:
    """A cost of this family that only moves bytes."""
    return Cost(family="movement", reads=accesses(*reads), writes=accesses(*writes))


@formula(
    "aten._pin_memory",
    "aten._to_copy",
    "aten.channel_shuffle",
    "aten.clone",
    "aten.diag_embed",
    "aten.flip",
    "aten.native_channel_shuffle",
    "aten.pixel_shuffle",
    "aten.pixel_unshuffle",
    "aten.repeat",
    "aten.roll",
    "aten.rot90",
    "aten.tile",
    *COPIES_OF_VIEWS,
)
def copy_of(op: Op) -> Cost:
    """The argument read, the results written; no more is read than the results can show."""
    source = op.tensor("self")
    # The wider of the two dtypes: the same element count for a cast, the same bytes for a view as another dtype.
    shown = sum(result.elements * max(result.item_bytes, source.item_bytes) for result in op.outputs)
    return moved([(source, min(source.bytes, shown))], op.outputs)


@formula("aten.as_strided_copy")
def copy_of_strided(op: Op) -> Cost:
    """What the new sizes and strides show of the argument read, the result written."""
    source = op.tensor("self")
    shown = replace(source, shape=tuple(op.arguments["size"]), strides=tuple(op.arguments["stride"]))
    return moved([(source, shown.bytes)], op.outputs)


@formula("aten.unfold_copy")
def copy_of_windows(op: Op) -> Cost:
    """The elements that some window shows read once, the windows written."""
    source, dimension, size, step = (op.arguments[name] for name in ("self", "dimension", "size", "step"))
    shape = list(source.shape)
    if shape:
        windows = (shape[dimension] - size) // step + 1
        shape[dimension] = windows * size if step >= size else (windows - 1) * step + size
    return moved([(source, replace(source, shape=tuple(shape)).bytes)], op.outputs)


@formula("aten.copy_", "aten.copy")
def copy(op: Op) -> Cost:
    """The source read, the destination written and not read. A tensor copied onto itself costs nothing."""
    source, target = op.tensor("src"), op.outputs[0]
    if source == target:
        return Cost(family="movement")
    return moved([(source, source.bytes if target.elements else 0.0)], [target])


@formula("aten._copy_from", "aten._copy_from_and_resize")
def copy_from(op: Op) -> Cost:
    """As `copy`, with the source as `self`."""
    return moved([op.tensor("self")], [op.tensor("dst")])


@formula("aten.cat", "aten.concat", "aten._stack", "aten.stack", "aten.block_diag", "aten._chunk_cat")
def join(op: Op) -> Cost:
    """Each tensor of the list read once, one that comes twice too; the result written."""
    return moved(op.arguments["tensors"], op.outputs)


@formula("aten.repeat_interleave.Tensor")
def repeated_indices(op: Op) -> Cost:
    """The counts read, the indices written."""
    return moved([op.tensor("repeats")], op.outputs)


@formula("aten.repeat_interleave")
def repeat_interleave(op: Op) -> Cost:
    """The result written and the counts read; the elements too where every one is repeated a known number of times."""
    source, repeats = op.tensor("self"), op.arguments["repeats"]
    if isinstance(repeats, Tensor):
        return moved([repeats], op.outputs)
    return moved([source] if repeats else [], op.outputs)


@formula(
    "aten.constant_pad_nd",
    "aten.reflection_pad1d",
    "aten.reflection_pad2d",
    "aten.reflection_pad3d",
    "aten.replication_pad1d",
    "aten.replication_pad2d",
    "aten.replication_pad3d",
)
def pad(op: Op) -> Cost:
    """What negative padding leaves of the argument read, the result written. Pairs go from the last dimension."""
    source = op.tensor("self")
    pairs: Sequence[int] = op.arguments.get("pad") or op.arguments.get("padding") or ()
    shape = list(source.shape)
    for number, (before, after) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
        shape[-1 - number] = max(0, shape[-1 - number] + min(0, before) + min(0, after))
    return moved([(source, replace(source, shape=tuple(shape)).bytes)], op.outputs)


@formula(
    "aten.reflection_pad1d_backward",
    "aten.reflection_pad2d_backward",
    "aten.reflection_pad3d_backward",
    "aten.replication_pad1d_backward",
    "aten.replication_pad2d_backward",
    "aten.replication_pad3d_backward",
    "aten.diagonal_backward",
    "aten.select_backward",
    "aten.slice_backward",
)
def gradient_of_selection(op: Op) -> Cost:
    """The gradient read, that of the whole argument written, zeros included. The argument gives only its shape."""
    return moved([op.tensor("grad_output")], op.outputs)


@formula("aten.unfold_backward")
def unfold_backward(op: Op) -> Cost:
    """As the other gradients of selections."""
    return moved([op.tensor("grad_in")], op.outputs)


@formula("aten.tril", "aten.tril_", "aten.triu", "aten.triu_")
def triangle(op: Op) -> Cost:
    """The triangle that is kept read and the result written; in place only the other triangle is written."""
    source, result = op.tensor("self"), op.outputs[0]
    if not source.elements:
        return Cost(family="movement")
    rows, columns = source.shape[-2:]
    diagonal = int(op.arguments["diagonal"])
    lower = op.packet.startswith("aten.tril")
    below = _on_or_below(rows, columns, diagonal if lower else diagonal - 1)
    share = (below if lower else rows * columns - below) / (rows * columns)
    if source == result:
        return Cost(family="movement", writes=accesses((result, result.bytes * (1 - share))))
    return moved([(source, source.bytes * share)], [result])


def _on_or_below(rows: int, columns: int, diagonal: int) -> int:
    """Elements of a matrix whose column is at most their row plus `diagonal`."""
    first = min(rows, max(0, -diagonal))  # the first row that has any
    full = min(rows, max(first, columns - diagonal - 1))  # the first row that has all
    partial = full - first
    return partial * (first + diagonal + 1) + partial * (partial - 1) // 2 + (rows - full) * columns


@formula("aten.im2col")
def im2col(op: Op) -> Cost:
    """Of the image the elements that some window covers read, the columns written."""
    image = op.tensor("self")
    shape = list(image.shape)
    for axis in (0, 1):
        shape[axis - 2] = len(set(_covered(op, axis, shape[axis - 2])))
    return moved([(image, replace(image, shape=tuple(shape)).bytes)], op.outputs)


@formula("aten.col2im")
def col2im(op: Op) -> Cost:
    """The columns read that do not lie in the padding, the image written."""
    columns = op.tensor("self")
    share = 1.0
    for axis in (0, 1):
        size = op.arguments["output_size"][axis]
        inside = len(_covered(op, axis, size))
        share *= inside / max(1, _windows(op, axis, size) * op.arguments["kernel_size"][axis])
    return moved([(columns, columns.bytes * share)], op.outputs)


def _windows(op: Op, axis: int, size: int) -> int:
    dilation, kernel = op.arguments["dilation"][axis], op.arguments["kernel_size"][axis]
    padding, stride = op.arguments["padding"][axis], op.arguments["stride"][axis]
    return int((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)


def _covered(op: Op, axis: int, size: int) -> list[int]:
    """Places along one axis of the image that each element of each window falls on, those in the padding left out."""
    dilation, padding, stride = (op.arguments[name][axis] for name in ("dilation", "padding", "stride"))
    places = (
        window * stride + tap * dilation - padding
        for window in range(_windows(op, axis, size))
        for tap in range(op.arguments["kernel_size"][axis])
    )
    return [place for place in places if 0 <= place < size]


@formula("aten._assert_async", "aten._functional_assert_async", "aten._local_scalar_dense", "aten.item")
def one_element(op: Op) -> Cost:
    """One element read; the number goes to the host, or is checked where it is."""
    source = op.tensor("self")
    return moved([(source, source.item_bytes)], [])


@formula("aten._pack_padded_sequence")
def pack(op: Op) -> Cost:
    """What the packed sequences hold read, and written."""
    source, packed = op.tensor("input"), op.outputs[0]
    return moved([(source, min(source.bytes, packed.elements * source.item_bytes))], op.outputs[:1])


@formula("aten.equal")
def equal(op: Op) -> Cost:
    """One element of each read: two that differ settle it, and torch stops there on a CPU."""
    pair = op.tensors("self", "other")
    same = len({tensor.shape for tensor in pair}) == 1
    return moved([(tensor, tensor.item_bytes) for tensor in pair if same and tensor.elements], [])


@formula("aten.allclose")
def all_close(op: Op) -> Cost:
    """As `equal`, where the shapes may be broadcast."""
    pair = op.tensors("self", "other")
    return moved([(tensor, tensor.item_bytes) for tensor in pair if all(each.elements for each in pair)], [])


@formula("aten._jagged_to_padded_dense_forward", "aten._padded_dense_to_jagged_forward")
def jagged(op: Op) -> Cost:
    """The result written and the offsets read. Rows may be cut or be all padding, so no more is sure to be read."""
    return moved(op.arguments["offsets"], op.outputs)
