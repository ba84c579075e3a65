"""`min_traffic`: the least that a kernel of Inductor's must move, from the event of its launch in a trace file.

The event has the tensors that the kernel was passed and the sizes of its loops, and neither the names of the tensors
nor its code. This is certain:

* Inductor passes tensors that are read and written first, then those that are read, then those that are written, then
  its own scratch memory; every kernel writes at least one; so the first or the last tensor is written. A pointwise
  kernel stores one element per point of its loops, a reduction one per row, unless it scatters, where two points may
  store to one place.
* The kernel's name lists the operators that were fused into it. If each of them uses its operands whole (`add`, `sum`,
  `view`, and not `slice`, `cat`, `embedding`), then the kernel uses each of its tensors whole: unused tensors are not
  passed. So the first is read, the last is written, and the others are read or written. Of others with the same dtype
  and size one counts, since arguments of compiled code may share memory.
* A template of a matrix product, fused with such operators alone, has two operands of M x K and K x N elements and a
  result of M x N, from which K follows. Of several pairs that fit, the least K counts.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nearpeak.ops.tensor import ITEM_BYTES
from nearpeak.trace.kineto.arguments import Argument, RecordedTensor, Scalar

_FUSED_NAME = re.compile(r"triton_(poi|red|per)_fused_(.*?)_\d+$")
_TEMPLATE_NAME = re.compile(r"triton_tem_fused_(.*?)_\d+$")
_SCATTER_OPERATORS = re.compile(
    r"scatter|index|embedding_(dense|sparse|bag|backward|renorm)|_put|pool|upsample|grid_sampler|nll_loss_backward|fold"
    r"|sort|bincount"
)
"""Names of operators that can become stores to computed addresses."""
_REDUCTION_OPERATORS = frozenset("amax amin linalg_vector_norm logsumexp mean prod std sum var var_mean".split())
WHOLE_OPERAND_OPERATORS = _REDUCTION_OPERATORS | frozenset(
    """
_fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data
native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward prepare_softmax_online
_to_copy _unsafe_view alias clone convert_element_type detach expand permute reshape squeeze t transpose unsqueeze view
abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
clamp_min cos cosh div elu eq erf erfc exp exp2 expm1 floor floor_divide fmod ge gelu gelu_backward gt hardsigmoid
hardswish hardtanh isinf isnan le leaky_relu lerp log log10 log1p log2 log_sigmoid log_sigmoid_backward
log_sigmoid_forward logical_and logical_not logical_or logical_xor logit lt maximum minimum mish mul ne neg pow
reciprocal relu remainder round rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus
softplus_backward sqrt square sub tan tanh tanh_backward trunc
""".split()
)
"""Operators whose result depends on every element of every operand."""
_GEMM_OPERATORS = frozenset(["addmm", "baddbmm", "bmm", "mm"])
_CAST_OPERATORS = frozenset(["_to_copy", "convert_element_type"])
_INTEGER_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


class RecordedGemm(NamedTuple):
    """A matrix product of a compiled kernel."""

    inner: int
    """Multiply-adds for an element of the result."""
    dtype: str
    operands: tuple[int, ...]
    """The places of its operands among the tensors of the kernel, where these are certain."""


class MinTraffic(NamedTuple):
    """The least that a kernel moves."""

    read: int | None
    """The index, among its tensors, of one that it reads whole."""
    touched: tuple[int, ...]
    """The indices of tensors that it reads or writes whole."""
    written: tuple[int, str] | None
    """Number and dtype of the elements that it writes."""
    gemm: RecordedGemm | None = None


def min_traffic(name: str, arguments: Sequence[Argument], facts: Mapping[str, Any]) -> MinTraffic:
    """The traffic that is certain.

    >>> x = RecordedTensor((8192, 2048), (2048, 1), "bfloat16")
    >>> y = x._replace(dtype="float32")
    >>> blocks = {"kernel_kwargs": "XBLOCK=1024"}
    >>> min_traffic("triton_poi_fused_add_0", (x, y, x, Scalar(16777216)), blocks)
    MinTraffic(read=0, touched=(1,), written=(16777216, 'bfloat16'), gemm=None)
    >>> min_traffic("triton_poi_fused_add_slice_0", (x, y, x, Scalar(16777216)), blocks)
    MinTraffic(read=None, touched=(), written=(16777216, 'bfloat16'), gemm=None)
    """
    template = _TEMPLATE_NAME.match(name)
    if template is not None:
        return _traffic_of_gemm(
            template[1], [argument for argument in arguments if isinstance(argument, RecordedTensor)]
        )
    match = _FUSED_NAME.match(name)
    tensors = [argument for argument in arguments if isinstance(argument, RecordedTensor)]
    sizes = [argument.value for argument in arguments if isinstance(argument, Scalar)]
    blocks = str(facts.get("kernel_kwargs", ""))
    nothing = MinTraffic(None, (), None)
    if match is None or not tensors or not all(_is_size(size) for size in sizes):
        return nothing
    kind, fused = match[1], match[2]
    loops = _loop_count(kind, blocks)
    if len(sizes) < loops or (_SCATTER_OPERATORS.search(fused) and not _cannot_scatter(fused, tensors)):
        return nothing
    sizes = sizes[len(sizes) - loops :]  # sizes of dynamic shapes come before
    scratch = "RSPLIT" in blocks
    points = math.prod(sizes if kind == "poi" else sizes[:1])
    ends = tensors if scratch else (tensors[0], tensors[-1])
    written = (points, min((str(tensor.dtype) for tensor in ends), key=lambda dtype: ITEM_BYTES[dtype]))
    operators = whole_operators(fused)
    if operators is None or len(tensors) == 1:  # a fill reads nothing
        return MinTraffic(None, (), written)
    return _traffic_of_whole_operands(
        tensors, math.prod(sizes), written, reduces=bool(operators & _REDUCTION_OPERATORS), scratch=scratch
    )


def _traffic_of_whole_operands(
    tensors: Sequence[RecordedTensor], points: int, written: tuple[int, str], *, reduces: bool, scratch: bool
) -> MinTraffic:
    """The traffic of a kernel that uses all of its tensors whole.

    A tensor with more elements than the loops have points counts only if a reduction was unrolled. Scratch memory comes
    last, is flat, and may be used in part: if there is some, no flat tensor at the end counts.
    """
    sizes = [(str(tensor.dtype), math.prod(tensor.shape)) for tensor in tensors]
    usable = [size <= points or (reduces and size % max(points, 1) == 0) for _, size in sizes]
    end = len(tensors) - 1
    if scratch:
        while end > 0 and len(tensors[end].shape) == 1:
            end -= 1
        end += 1
    elif usable[end]:
        written = (sizes[end][1], sizes[end][0])
    counted = {sizes[0]} if scratch else {sizes[0], sizes[-1]}
    touched = []
    for place in range(1, end):
        if usable[place] and sizes[place] not in counted:
            counted.add(sizes[place])
            touched.append(place)
    return MinTraffic(0 if usable[0] else None, tuple(touched), written)


def _traffic_of_gemm(fused: str, tensors: Sequence[RecordedTensor]) -> MinTraffic:
    """The traffic of a template. A cast may have made float32 operands smaller, and the product faster."""
    operators = _parse_operators(fused, WHOLE_OPERAND_OPERATORS | _GEMM_OPERATORS)
    if operators is None or len(operators & _GEMM_OPERATORS) != 1 or len(tensors) < 3:
        return MinTraffic(None, (), None)
    *inputs, out = tensors
    pairs = [
        (inner, places)
        for places in itertools.combinations(range(len(inputs)), 2)
        if (inner := _inner_size(inputs[places[0]], inputs[places[1]], out)) is not None
    ]
    written = (math.prod(out.shape), str(out.dtype))
    if not pairs:
        return MinTraffic(None, (), None)
    inner, places = min(pairs)
    dtypes = {str(inputs[place].dtype) for _, both in pairs for place in both}
    if len(dtypes) > 1 or (operators & _CAST_OPERATORS and not dtypes <= {"bfloat16", "float16"}):
        return MinTraffic(None, (), written)
    return MinTraffic(None, (), written, RecordedGemm(inner, dtypes.pop(), places if len(pairs) == 1 else ()))


def _inner_size(left: RecordedTensor, right: RecordedTensor, out: RecordedTensor) -> int | None:
    """The size K that a product of these sums over, whatever the layout of its operands; None if they do not fit."""
    if len(left.shape) != len(right.shape) or len(left.shape) not in (2, 3):
        return None
    batch = left.shape[0] if len(left.shape) == 3 else 1
    if len(right.shape) == 3 and right.shape[0] != batch:
        return None
    square, rest = divmod(math.prod(left.shape) * math.prod(right.shape), max(math.prod(out.shape) * batch, 1))
    inner = math.isqrt(square)
    if rest or inner**2 != square or inner not in left.shape[-2:] or inner not in right.shape[-2:]:
        return None
    # Partial sums, which another kernel adds up, are a larger result.
    columns = [math.prod(tensor.shape) // max(inner * batch, 1) for tensor in (left, right)]
    return inner if out.shape and out.shape[-1] in columns else None


def whole_operators(fused: str) -> frozenset[str] | None:
    """The operators in a kernel's name, if all of them use their operands whole; else None.

    A name has each operator once, in alphabetical order, separated by underscores.

    >>> sorted(whole_operators("_to_copy__unsafe_view_add_mean_mul"))
    ['_to_copy', '_unsafe_view', 'add', 'mean', 'mul']
    >>> whole_operators("add_slice") is None
    True
    """
    return _parse_operators(fused, WHOLE_OPERAND_OPERATORS)


@functools.lru_cache(maxsize=4096)
def _parse_operators(fused: str, allowed: frozenset[str]) -> frozenset[str] | None:
    ends: dict[int, frozenset[str]] = {}
    """The operators up to a position at which another can begin."""
    for start in [0, *(match.end() for match in re.finditer("_", fused))]:
        before = ends.get(start) if start else frozenset[str]()
        if before is None:
            continue
        for stop in [*(match.start() for match in re.finditer("_", fused)), len(fused)]:
            operator = fused[start:stop]
            if operator in allowed and operator > max(before, default=""):
                ends.setdefault(stop + 1, before | {operator})
    return ends.get(len(fused) + 1)


def _cannot_scatter(fused: str, tensors: Sequence[RecordedTensor]) -> bool:
    """Whether a kernel of an embedding's gradient has no integer tensor, and so no row indices to scatter to.

    The kernels that clear and cast the gradient have this name too.
    """
    return fused == "embedding_dense_backward" and not any(tensor.dtype in _INTEGER_DTYPES for tensor in tensors)


def _loop_count(kind: str, blocks: str) -> int:
    """How many of the last numbers are loop sizes. A persistent reduction has a loop size without a block size."""
    pointwise = len(re.findall(r"\b[XYZ]BLOCK=", blocks)) or 1
    if kind == "poi":
        return pointwise
    return pointwise + (len(re.findall(r"\bR\d?_?BLOCK=", blocks)) or 1)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
