"""Long lists of tensors, which the profiler leaves out: what the kernels of the op and the gradients say of them.

The profiler writes no members of a list of more than 30. The `_foreach_` and `_fused_` operators on CUDA go over their
lists in chunks, one block of a kernel for each: a tensor of n elements has ceil(n / 65536) of them. All lists have the
same sizes and, but for copies, one dtype, which is in the kernel's name. So the grids say how many chunks there are,
and that has two uses:

* Each `AccumulateGrad` of the backward pass shows one gradient. If these make exactly as many chunks, and have the
  dtype that the kernel works in, they are the members, and the other lists look like them.
* Otherwise a list has at least the elements of its full chunks: a launch holds only so many tensors, and each of them
  has one chunk at the most that is not full.

Index tensors are such a list too, of any length. The kernel of `x[i]` has a block for so many elements of the result.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nearpeak.capture.kineto.operators import Operator
from nearpeak.capture.kineto.tensors import DTYPES, UNKNOWN, Argument, Members, Seen, contiguous_strides
from nearpeak.work.tensor import ITEM_BYTES

_CHUNK = 65536
"""Elements that a block of these kernels takes."""
_MOST_BLOCKS = {False: 320, True: 2240}
_MOST_TENSORS = {False: (110, 64, 48, 36, 30), True: (770, 448, 336, 252, 210)}
"""In one launch, by the number of lists; for kernels with arguments of up to 4 and up to 32 KB."""
_KERNEL = re.compile(r"multi_tensor_apply_kernel<.*?TensorList\w*Metadata<(?:[^<>]*(?:<[^<>]*>)?, *)??(\d+)(, *\w+)?>")
_FUNCTOR = re.compile(r"\w*Functor\w*<")
_ARGUMENT = re.compile(r" *([\w:]+(?:<[\w:]+>)?) *[,>]")
_GATHER = re.compile(r"index_elementwise_kernel<(?:\(int\))?(\d+), (?:\(int\))?(\d+), .*?\bindex_kernel_impl<")
_SINGLE_NUMBERS = "state_steps"


class LongLists(NamedTuple):
    """The arguments of an op with its long lists filled in."""

    arguments: tuple[Argument, ...]
    members: tuple[Seen, ...]
    """Of each list. If they are not known, one flat tensor of as many elements as it has at the least."""
    exact: bool
    """Whether they are known."""
    separate: int
    """How many lists cannot be the same memory."""


class Launch(NamedTuple):
    """One kernel of the op."""

    name: str
    blocks: int | None


def least_gathered(arguments: tuple[Argument, ...], launches: Sequence[Launch]) -> LongLists | None:
    """Of `x[i]`: the result as one flat tensor of as many elements as it has at the least; None if that is not known.

    >>> x = Seen((100, 64), (64, 1), "float32")
    >>> kernel = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
    >>> found = least_gathered((x, None), [Launch(kernel + "index_kernel_impl<at::native::OpaqueType<4> >", 7)])
    >>> found.members  # six full blocks, and one that is not empty
    (Seen(shape=(3073,), strides=(1,), dtype='float32'),)
    """
    source = arguments[0] if arguments else None
    elements = 0
    for launch in launches:
        match = _GATHER.search(launch.name)
        if match is not None and launch.blocks:
            elements += (launch.blocks - 1) * int(match[1]) * int(match[2]) + 1
    if not elements or not isinstance(source, Seen):
        return None
    return LongLists(arguments, (Seen((elements,), (1,), source.dtype),), exact=False, separate=1)


def has_long_lists(operator: Operator | None, arguments: Sequence[Argument]) -> bool:
    """Whether it is one of the operators on lists, and the file shows none of their members."""
    if operator is None or not operator.overload._opname.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    lists = [argument for _, argument in _lists(operator, arguments)]
    return bool(lists) and all(argument is UNKNOWN for argument in lists)


def long_lists(
    operator: Operator, arguments: tuple[Argument, ...], launches: Sequence[Launch], gradients: Sequence[Seen]
) -> LongLists | None:
    """The arguments with all lists filled in; None where the kernels do not tell.

    `gradients` are those of the backward pass before it, each as often as it was added to.
    """
    launches = [launch for launch in launches if "multi_tensor_apply_kernel<" in launch.name]
    match = _KERNEL.search(launches[0].name) if launches else None
    blocks = [launch.blocks for launch in launches if launch.blocks]
    if match is None or len({launch.name for launch in launches}) > 1 or len(blocks) < len(launches):
        return None
    depth, large = int(match[1]), match[2] is not None and "true" in match[2]
    dtypes = list(_dtypes(launches[0].name[match.end() :]))
    if not dtypes or not 1 <= depth <= len(_MOST_TENSORS[large]):
        return None
    members = _gradients(gradients, sum(blocks)) if len(set(dtypes)) == 1 else None
    exact = members is not None and {member.dtype for member in members} == set(dtypes)
    if members is None or not exact:
        dtype = min(dtypes, key=lambda name: ITEM_BYTES[name])
        elements = _least(blocks, depth, large)
        members = (Seen((elements,), (1,), dtype),)
    lists = sum(1 for _ in _lists(operator, arguments))
    separate = depth if operator.overload._opname.startswith("_fused_") else 1 + (depth > lists)
    return LongLists(_filled(operator, arguments, members, depth), members, exact, separate)


def _filled(
    operator: Operator, arguments: tuple[Argument, ...], members: tuple[Seen, ...], depth: int
) -> tuple[Argument, ...]:
    """The kernel goes over `depth` lists: the first ones of the operator, and its results where it returns some."""
    filled = list(arguments)
    for place, _ in _lists(operator, arguments):
        if operator.parameters[place].name == _SINGLE_NUMBERS:
            filled[place] = Members(tuple(Seen((), (), "float32") for _ in members))
        else:
            filled[place] = Members(members if depth > 0 else ())
            depth -= 1
    return tuple(filled)


def _lists(operator: Operator, arguments: Sequence[Argument]) -> Iterator[tuple[int, Argument]]:
    for place, (parameter, argument) in enumerate(zip(operator.parameters, arguments, strict=False)):
        if parameter.kind == "List[Tensor]":
            yield place, argument


def _dtypes(functor: str) -> Iterator[str]:
    """The dtypes that a kernel works with: the first template arguments of its functor."""
    match = _FUNCTOR.search(functor)
    while match is not None:
        match = _ARGUMENT.match(functor, match.end())
        dtype = DTYPES.get(match[1].lower()) if match else None
        if dtype is None:
            return
        yield dtype


def _gradients(gradients: Sequence[Seen], chunks: int) -> tuple[Seen, ...] | None:
    """The gradients, each once, if they make this many chunks. Several passes before one step add to each as often."""
    counts = Counter(gradients)
    total = sum(count * _chunks(gradient) for gradient, count in counts.items())
    passes, rest = divmod(total, chunks)
    if not passes or rest or any(count % passes for count in counts.values()):
        return None
    # The parameters are contiguous or not; the gradients have their strides, and `_foreach_` asks for no gaps.
    return tuple(
        gradient._replace(strides=contiguous_strides(gradient.shape)) if _gaps(gradient) else gradient
        for gradient, count in counts.items()
        for _ in range(count // passes)
    )


def _chunks(seen: Seen) -> int:
    return -(-math.prod(seen.shape) // _CHUNK)


def _gaps(seen: Seen) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(seen.shape, seen.strides, strict=True))
    return last + 1 != math.prod(seen.shape)


def _least(blocks: Sequence[int], depth: int, large: bool) -> int:
    """Elements that these chunks have at the least."""
    elements = 0
    for count in blocks:
        tensors = _MOST_TENSORS[large][depth - 1] if count <= _MOST_BLOCKS[large] else count
        parts = min(tensors, count)
        elements += (count - parts) * _CHUNK + parts
    return elements
