"""`record_inductor_kernels`: inside a live trace, compiled code runs as it is, and each Inductor kernel is an op.

Compiled code bypasses torch's dispatcher, except for the operators that Inductor leaves to libraries. What a kernel
reads and writes follows from its source (`touched_elements`): Inductor writes every kernel in one style, with loops
over `xnumel` (`ynumel`, `znumel`) points and, in a reduction, over `r0_numel`; variables that are digits of the loop
index, `x0 = xindex % 64`, `x1 = xindex // 64`; and loads and stores at sums of such variables. So the number of
distinct addresses of a load follows from its index. What does not follow counts as nothing: addresses that come from
another load, loads under a condition. Of templates, which have another style, a part is known (`kineto/inductor.py`).
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._dynamo.callback import callback_handler

from nearpeak.ops.cost import Family
from nearpeak.ops.op import name_with_origin
from nearpeak.ops.tensor import Tensor
from nearpeak.trace.kineto.arguments import Argument, RecordedTensor, Scalar
from nearpeak.trace.kineto.inductor import min_traffic
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import Recorder, active_recorder
from nearpeak.trace.schema import OperatorSchema
from nearpeak.trace.storages import dtype_name

_LOOP_INDEX = re.compile(r"^([xyz]|r\d*_?)index$")
_LOOP_SIZE = re.compile(r"^([xyz]|r\d*_?)numel$")
_LOOP_MASK = re.compile(r"^([xyz]|r\d*_?)mask$")


class IndexDigits(NamedTuple):
    """Some digits of a loop index: `(index // divisor) % extent`."""

    loop: str
    divisor: int
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedElements:
    """Numbers of elements, by the name of the argument."""

    read: Mapping[str, int]
    written: Mapping[str, int]
    complete: bool
    """Whether every load and store was understood; else the numbers are minima."""
    written_before: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What a kernel had written when it first read an argument. Where these share memory, it reads its own result."""


@functools.lru_cache(maxsize=4096)
def touched_elements(code: str, sizes: tuple[tuple[str, int], ...] = ()) -> TouchedElements | None:
    """The elements that a kernel reads and writes; None for code of another style.

    >>> touched = touched_elements('''
    ... def triton_poi_fused_add_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    ...     xnumel = 4096
    ...     xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    ...     xmask = xindex < xnumel
    ...     x2 = xindex
    ...     x0 = (xindex % 64)
    ...     tmp0 = tl.load(in_ptr0 + (x2), xmask)
    ...     tmp1 = tl.load(in_ptr1 + (x0), xmask, eviction_policy='evict_last')
    ...     tl.store(out_ptr0 + (x2), tmp0 + tmp1, xmask)
    ... ''')
    >>> touched.read, touched.written, touched.complete
    ({'in_ptr0': 4096, 'in_ptr1': 64}, {'out_ptr0': 4096}, True)

    Args:
        code: The definition of the kernel.
        sizes: The integers that it was launched with, by the names of its arguments, for sizes that it leaves open.
    """
    try:
        tree = ast.parse(code.strip())
    except SyntaxError:
        return None
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if function is None:
        return None
    reading = KernelReader(dict(sizes))
    reading.body(function.body)
    if not reading.written and not reading.read and reading.complete:
        return None
    return TouchedElements(read=reading.read, written=reading.written, complete=reading.complete)


class KernelReader:
    """Interprets the statements in order; a name has the value that was assigned last."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.digits: dict[str, IndexDigits] = {}
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.complete = True

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, (ast.For, ast.If, ast.While)):  # a kernel with several bodies
                self.body(statement.body)
                self.body(statement.orelse)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._assign(statement.targets[0].id, statement.value)
                self._calls(statement.value)
            else:
                self._calls(statement)

    def _assign(self, name: str, value: ast.expr) -> None:
        if _LOOP_SIZE.match(name):
            size = integer_constant(value)
            if size is not None:
                self.sizes[name] = size
            return
        digits = self._as_digits(value)
        if digits is not None:
            self.digits[name] = digits
        else:
            self.digits.pop(name, None)

    def _as_digits(self, value: ast.expr) -> IndexDigits | None:
        """The digits that an expression is: a loop index, digits of it, or digits of digits."""
        if isinstance(value, ast.Name):
            loop = _LOOP_INDEX.match(value.id)
            if loop is not None:
                size = self.sizes.get(f"{loop[1]}numel")
                return None if size is None else IndexDigits(loop[1], 1, max(size, 1))
            return self.digits.get(value.id)
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, (ast.Mod, ast.FloorDiv)):
            return None
        inner, number = self._as_digits(value.left), integer_constant(value.right)
        if inner is None or not number or number < 1:
            return None
        if isinstance(value.op, ast.Mod):
            return inner._replace(extent=min(inner.extent, number))
        return IndexDigits(inner.loop, inner.divisor * number, -(-inner.extent // number))

    def _calls(self, node: ast.AST) -> None:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                if call.func.attr == "load" and call.args:
                    self._access(call, self.read, mask=1)
                elif call.func.attr == "store" and call.args:
                    self._access(call, self.written, mask=2)
                elif call.func.attr.startswith("atomic"):
                    self.complete = False

    def _access(self, call: ast.Call, into: dict[str, int], *, mask: int) -> None:
        place = call.args[0]
        if (
            not isinstance(place, ast.BinOp)
            or not isinstance(place.op, ast.Add)
            or not isinstance(place.left, ast.Name)
        ):
            self.complete = False
            return
        masks = call.args[mask : mask + 1] + [item.value for item in call.keywords if item.arg == "mask"]
        count = self.places(place.right) if all(_masks_only_bounds(item) for item in masks) else None
        if count is None:
            self.complete = False
            return
        name = place.left.id
        if into is self.read and name in self.written:  # its own result
            return
        into[name] = max(into.get(name, 0), count)

    def places(self, index: ast.expr) -> int | None:
        """The minimum number of distinct values of a sum of digits; None for another expression."""
        terms: list[tuple[int, IndexDigits]] = []
        if not self._terms(index, 1, terms):
            return None
        terms = [(abs(factor), digits) for factor, digits in terms if digits.extent > 1 and factor]
        if not terms:
            return 1
        if any(_digits_overlap(first, second) for (_, first), (_, second) in itertools.combinations(terms, 2)):
            return max(digits.extent for _, digits in terms)
        places, reach = 1, 0
        for factor, digits in sorted(terms):
            if factor > reach:
                places *= digits.extent
            else:  # two digit sums can be equal
                places = max(places, digits.extent)
            reach += factor * (digits.extent - 1)
        sizes = {digits.loop: self.sizes[f"{digits.loop}numel"] for _, digits in terms}
        return min(places, max(1, math.prod(sizes.values())))

    def _terms(self, node: ast.expr, factor: int, terms: list[tuple[int, IndexDigits]]) -> bool:
        if integer_constant(node) is not None:
            return True
        digits = self._as_digits(node)
        if digits is not None:
            terms.append((factor, digits))
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._terms(node.operand, -factor, terms)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Add, ast.Sub)):
                sign = 1 if isinstance(node.op, ast.Add) else -1
                return self._terms(node.left, factor, terms) and self._terms(node.right, sign * factor, terms)
            if isinstance(node.op, ast.Mult):
                for number, rest in ((node.left, node.right), (node.right, node.left)):
                    value = integer_constant(number)
                    if value is not None:
                        return self._terms(rest, factor * value, terms)
        if isinstance(node, ast.Call):  # `tl.full([1], 0, tl.int32).broadcast_to(...)` is how a scalar is stored
            return _is_scalar_index(node)
        return False


def _digits_overlap(first: IndexDigits, second: IndexDigits) -> bool:
    """Whether two share digits of one index, so that they are not independent."""
    if first.loop != second.loop:
        return False
    low, high = sorted((first, second), key=lambda digits: digits.divisor)
    return low.divisor * low.extent > high.divisor


def _is_scalar_index(node: ast.Call) -> bool:
    inner = node
    while isinstance(inner.func, ast.Attribute) and isinstance(inner.func.value, ast.Call):
        inner = inner.func.value
    return isinstance(inner.func, ast.Attribute) and inner.func.attr == "full"


def _masks_only_bounds(mask: ast.expr) -> bool:
    """Whether a mask only excludes points beyond the ends of the loops."""
    if isinstance(mask, ast.Constant):
        return mask.value is None
    if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        return _masks_only_bounds(mask.left) and _masks_only_bounds(mask.right)
    return isinstance(mask, ast.Name) and _LOOP_MASK.match(mask.id) is not None


def integer_constant(node: ast.expr | None) -> int | None:
    """The value of an expression of numbers; None for another one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = integer_constant(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in _INTEGER_OPERATORS:
        left, right = integer_constant(node.left), integer_constant(node.right)
        if left is not None and right is not None and (right or not isinstance(node.op, (ast.FloorDiv, ast.Mod))):
            return _INTEGER_OPERATORS[type(node.op)](left, right)
    return None


_INTEGER_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_REDUCTION_PREFIXES = ("triton_red_", "triton_per_")


@SharedPatch
@contextmanager
def _patch_autotuner() -> Iterator[None]:
    """Inside, launches of Inductor's kernels are recorded. Nothing is imported: who has kernels has imported it."""
    kind = getattr(sys.modules.get(_HEURISTICS), "CachingAutotuner", None)
    if kind is None:
        yield
        return
    with patch_attribute(kind, "run", _recording_run(kind.run)):
        yield


@contextmanager
def record_inductor_kernels(recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder records compiled kernels, and no ops of the compiler if it runs again."""

    def pause(_: Any) -> None:
        recorder.paused = True

    def resume(_: Any) -> None:
        recorder.paused = False

    callbacks = ((callback_handler.start_callbacks, pause), (callback_handler.end_callbacks, resume))
    for register, callback in callbacks:
        register.append(callback)
    try:
        with _patch_autotuner():
            yield
    finally:
        for register, callback in callbacks:
            if callback in register:  # torch._dynamo.reset() clears them
                register.remove(callback)


def _recording_run(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None or kwargs.get("benchmark_run"):
            return launch(self, *args, **kwargs)
        recorder.launch_begins()
        recorder.record_beside(_record_launch, recorder, self, args)
        result = launch(self, *args, **kwargs)
        recorder.launch_ended()
        return result

    return run


def _record_launch(recorder: Recorder, kernel: Any, args: Sequence[Any]) -> None:
    name = str(kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__)
    arguments_by_name = dict(zip(kernel.fn.arg_names, args, strict=False))
    tensors = {key: value for key, value in arguments_by_name.items() if isinstance(value, torch.Tensor)}
    sizes = tuple((key, value) for key, value in arguments_by_name.items() if type(value) is int)
    touched = touched_elements(kernel.fn.src, sizes) if name.startswith("triton_") else None
    family: Family = "reduction" if name.startswith(_REDUCTION_PREFIXES) else "pointwise"
    if touched is None or not (touched.read or touched.written):
        arguments = _arguments_from_template(recorder, name, list(arguments_by_name.values()), tensors)
        _record(recorder, name, arguments, family)
    else:
        record_kernel(recorder, name, touched, tensors, family)


def record_kernel(
    recorder: Recorder,
    name: str,
    touched: TouchedElements | None,
    tensors: Mapping[str, torch.Tensor],
    family: Family,
) -> None:
    """Records a kernel of which it is known what it touches; None is nothing."""
    nothing = TouchedElements(read={}, written={}, complete=False)
    _record(recorder, name, _arguments_from_code(recorder, touched or nothing, tensors), family)


def _record(recorder: Recorder, name: str, arguments: dict[str, Any], family: Family) -> None:
    arguments["family"] = family
    schema = OperatorSchema(
        name=name_with_origin("inductor", name),
        arguments=tuple(arguments),
        defaults={},
        mutated=("written",),
        origin="inductor",
    )
    recorder.record(schema, arguments)


def _arguments_from_code(
    recorder: Recorder, touched: TouchedElements, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """The arguments of the op. A tensor that is written and new was allocated by compiled code."""
    storage = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    own = {
        name
        for name, before in touched.written_before.items()
        if any(name in storage and storage[name] == storage.get(written) for written in before)
    }
    read = [
        _partial_tensor(recorder, tensors[name], count, "input")
        for name, count in touched.read.items()
        if name in tensors and name not in own
    ]
    written = [
        _partial_tensor(recorder, tensors[name], count, "intermediate")
        for name, count in touched.written.items()
        if name in tensors
    ]
    return {"read": tuple(read), "written": tuple(written), "complete": touched.complete}


def _partial_tensor(recorder: Recorder, tensor: torch.Tensor, count: int, kind: Any) -> Tensor:
    whole = recorder.storages.tensor(tensor, kind)
    count = min(count, whole.elements)
    return Tensor(shape=(count,), strides=(1,), dtype=whole.dtype, storage=whole.storage, offset=whole.offset)


def _arguments_from_template(
    recorder: Recorder, name: str, values: Sequence[Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The arguments of a matrix product with fused operators; the last tensor is its result."""
    recorded: list[Argument] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            recorded.append(RecordedTensor(tuple(value.shape), value.stride(), dtype_name(value.dtype)))
        elif isinstance(value, int):
            recorded.append(Scalar(value))
    traffic = min_traffic(name, recorded, {})
    *inputs, out = tensors.values() if tensors else (None,)
    plain = [recorder.storages.tensor(tensor, "input") for tensor in inputs if tensor is not None]
    arguments: dict[str, Any] = {"read": (), "written": (), "complete": False}
    if out is not None and traffic.written is not None:
        arguments["written"] = (recorder.storages.tensor(out, "intermediate"),)
    if traffic.gemm is not None:
        arguments |= {"inner": traffic.gemm.inner, "product": traffic.gemm.dtype}
        arguments["read"] = tuple(plain[place] for place in traffic.gemm.operands if place < len(plain))
    return arguments
