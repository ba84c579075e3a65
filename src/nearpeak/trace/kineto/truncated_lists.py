"""Lists of tensors that the profiler truncates, restored from the kernels of the op and from gradients.

The profiler writes no members of a list of more than 30. The `_foreach_` and `_fused_` operators on CUDA process their
lists in chunks, one block of a kernel for each: a tensor of n elements has ceil(n / 65536) chunks. All lists have the
same sizes and, except for copies, one dtype, which is in the kernel's name. So the grids tell the number of chunks,
which has two uses:

* Each `AccumulateGrad` of the backward pass shows one gradient. If the gradients make exactly as many chunks, and have
  the dtype of the kernel, they are the members, and the other lists have the same shapes.
* Otherwise a list has at least the elements of its full chunks: a launch takes a limited number of tensors, and each
  of them has at most one chunk that is not full.

Index tensors are such a list too, of any length. The grid of the kernel of `x[i]` follows from the size of its result.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nearpeak.ops.tensor import ITEM_BYTES
from nearpeak.trace.kineto.arguments import DTYPES, UNKNOWN, Argument, RecordedTensor, TensorList, contiguous_strides
from nearpeak.trace.kineto.operators import RecordedOperator

_CHUNK = 65536
"""Elements per block of these kernels."""
_MAX_BLOCKS = {False: 320, True: 2240}
_MAX_TENSORS = {False: (110, 64, 48, 36, 30), True: (770, 448, 336, 252, 210)}
"""Tensors in one launch, by the number of lists, for kernels with up to 4 KB of arguments and up to 32 KB."""
_MULTI_TENSOR_KERNEL = re.compile(
    r"multi_tensor_apply_kernel<.*?TensorList\w*Metadata<(?:[^<>]*(?:<[^<>]*>)?, *)??(\d{1,9})(, *\w+)?>"
)
_FUNCTOR = re.compile(r"\w*Functor\w*<")
_ARGUMENT = re.compile(r" *([\w:]+(?:<[\w:]+>)?) *[,>]")
_GATHER_KERNEL = re.compile(
    r"index_elementwise_kernel<(?:\(int\))?(\d{1,9}), (?:\(int\))?(\d{1,9}), .*?\bindex_kernel_impl<"
)
_STEP_COUNTS = "state_steps"


class TruncatedLists(NamedTuple):
    """The arguments of an op with its truncated lists restored."""

    arguments: tuple[Argument, ...]
    members: tuple[RecordedTensor, ...]
    """Of each list. If they are not known, one flat tensor with the minimum number of elements."""
    exact: bool
    """Whether the members are known."""
    separate: int
    """The number of lists that cannot share memory."""


class KernelLaunch(NamedTuple):
    """One kernel of the op."""

    name: str
    blocks: int | None


def min_gathered(arguments: tuple[Argument, ...], launches: Sequence[KernelLaunch]) -> TruncatedLists | None:
    """The result of `x[i]` as one flat tensor with the minimum number of elements; None if that is not known.

    >>> x = RecordedTensor((100, 64), (64, 1), "float32")
    >>> kernel = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
    >>> launch = KernelLaunch(kernel + "index_kernel_impl<at::native::OpaqueType<4> >", 7)
    >>> min_gathered((x, None), [launch]).members  # six full blocks, and one that is not empty
    (RecordedTensor(shape=(3073,), strides=(1,), dtype='float32'),)
    """
    source = arguments[0] if arguments else None
    elements = 0
    for launch in launches:
        match = _GATHER_KERNEL.search(launch.name)
        if match is not None and launch.blocks:
            elements += (launch.blocks - 1) * int(match[1]) * int(match[2]) + 1
    if not elements or not isinstance(source, RecordedTensor):
        return None
    return TruncatedLists(arguments, (RecordedTensor((elements,), (1,), source.dtype),), exact=False, separate=1)


def has_truncated_lists(operator: RecordedOperator | None, arguments: Sequence[Argument]) -> bool:
    """Whether it is an operator on lists, and the file shows no members."""
    if operator is None or not operator.overload._opname.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    lists = [argument for _, argument in _list_arguments(operator, arguments)]
    return bool(lists) and all(argument is UNKNOWN for argument in lists)


def restore_lists(
    operator: RecordedOperator,
    arguments: tuple[Argument, ...],
    launches: Sequence[KernelLaunch],
    gradients: Sequence[RecordedTensor],
) -> TruncatedLists | None:
    """The arguments with all lists restored; None if the kernels do not tell.

    `gradients` are those of the backward pass before it, each as often as it was accumulated.
    """
    launches = [launch for launch in launches if "multi_tensor_apply_kernel<" in launch.name]
    match = _MULTI_TENSOR_KERNEL.search(launches[0].name) if launches else None
    blocks = [launch.blocks for launch in launches if launch.blocks]
    if match is None or len({launch.name for launch in launches}) > 1 or len(blocks) < len(launches):
        return None
    depth, large = int(match[1]), match[2] is not None and "true" in match[2]
    dtypes = list(_functor_dtypes(launches[0].name[match.end() :]))
    if not dtypes or not 1 <= depth <= len(_MAX_TENSORS[large]):
        return None
    members = _matching_gradients(gradients, sum(blocks)) if len(set(dtypes)) == 1 else None
    exact = members is not None and {member.dtype for member in members} == set(dtypes)
    if members is None or not exact:
        dtype = min(dtypes, key=lambda name: ITEM_BYTES[name])
        elements = _min_elements(blocks, depth, large)
        members = (RecordedTensor((elements,), (1,), dtype),)
    lists = sum(1 for _ in _list_arguments(operator, arguments))
    separate = depth if operator.overload._opname.startswith("_fused_") else 1 + (depth > lists)
    return TruncatedLists(_fill_lists(operator, arguments, members, depth), members, exact, separate)


def _fill_lists(
    operator: RecordedOperator, arguments: tuple[Argument, ...], members: tuple[RecordedTensor, ...], depth: int
) -> tuple[Argument, ...]:
    """The kernel processes `depth` lists: the first ones of the operator, and its results if it returns some."""
    filled = list(arguments)
    for place, _ in _list_arguments(operator, arguments):
        if operator.parameters[place].name == _STEP_COUNTS:
            filled[place] = TensorList(tuple(RecordedTensor((), (), "float32") for _ in members))
        else:
            filled[place] = TensorList(members if depth > 0 else ())
            depth -= 1
    return tuple(filled)


def _list_arguments(operator: RecordedOperator, arguments: Sequence[Argument]) -> Iterator[tuple[int, Argument]]:
    for place, (parameter, argument) in enumerate(zip(operator.parameters, arguments, strict=False)):
        if parameter.kind == "List[Tensor]":
            yield place, argument


def _functor_dtypes(functor: str) -> Iterator[str]:
    """The dtypes of a kernel: the first template arguments of its functor."""
    match = _FUNCTOR.search(functor)
    while match is not None:
        match = _ARGUMENT.match(functor, match.end())
        dtype = DTYPES.get(match[1].lower()) if match else None
        if dtype is None:
            return
        yield dtype


def _matching_gradients(gradients: Sequence[RecordedTensor], chunks: int) -> tuple[RecordedTensor, ...] | None:
    """Each gradient once, if they make this many chunks. Several passes before a step accumulate each as often."""
    counts = Counter(gradients)
    total = sum(count * _chunk_count(gradient) for gradient, count in counts.items())
    passes, rest = divmod(total, chunks)
    if not passes or rest or any(count % passes for count in counts.values()):
        return None
    # Gradients have the strides of their parameters, and `_foreach_` takes no tensors with gaps.
    return tuple(
        gradient._replace(strides=contiguous_strides(gradient.shape)) if _has_gaps(gradient) else gradient
        for gradient, count in counts.items()
        for _ in range(count // passes)
    )


def _chunk_count(tensor: RecordedTensor) -> int:
    return -(-math.prod(tensor.shape) // _CHUNK)


def _has_gaps(tensor: RecordedTensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return last + 1 != math.prod(tensor.shape)


def _min_elements(blocks: Sequence[int], depth: int, large: bool) -> int:
    """The minimum number of elements in these chunks."""
    elements = 0
    for count in blocks:
        tensors = _MAX_TENSORS[large][depth - 1] if count <= _MAX_BLOCKS[large] else count
        parts = min(tensors, count)
        elements += (count - parts) * _CHUNK + parts
    return elements
