"""`touched_by`: how many elements of each tensor a kernel of Inductor's reads and writes, from its code.

Inductor writes every kernel in one manner: loops over `xnumel` (`ynumel`, `znumel`) points and, in a reduction, over
`r0_numel`; variables that are digits of the loop's index, `x0 = xindex % 64`, `x1 = xindex // 64`; and loads and stores
at sums of such variables. So the number of different places that a load reads follows from its index. What does not
follow counts as nothing: places that come from another load, loads under a condition.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_LOOPS = re.compile(r"^([xyz]|r\d*_?)index$")
_SIZES = re.compile(r"^([xyz]|r\d*_?)numel$")
_MASKS = re.compile(r"^([xyz]|r\d*_?)mask$")


class Digits(NamedTuple):
    """Some digits of a loop's index: `(index // divisor) % extent`."""

    loop: str
    divisor: int
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Elements by the name of the argument."""

    read: Mapping[str, int]
    written: Mapping[str, int]
    complete: bool
    """Whether every load and store was understood; else what is here is the least."""


@functools.lru_cache(maxsize=4096)
def touched_by(code: str, sizes: tuple[tuple[str, int], ...] = ()) -> Touched | None:
    """What a kernel touches at the least; None for code that is of another manner.

    >>> found = touched_by('''
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
    >>> found.read, found.written, found.complete
    ({'in_ptr0': 4096, 'in_ptr1': 64}, {'out_ptr0': 4096}, True)

    Args:
        code: The definition of the kernel.
        sizes: The numbers that it was launched with, by the names of its arguments, for sizes that it leaves open.
    """
    try:
        tree = ast.parse(code.strip())
    except SyntaxError:
        return None
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if function is None:
        return None
    reading = _Reading(dict(sizes))
    reading.body(function.body)
    if not reading.written and not reading.read and reading.complete:
        return None
    return Touched(read=reading.read, written=reading.written, complete=reading.complete)


class _Reading:
    """Goes through the statements in order; a name means what it was given last."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.digits: dict[str, Digits] = {}
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.complete = True

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, (ast.For, ast.If, ast.While)):  # blocks of a kernel that is several
                self.body(statement.body)
                self.body(statement.orelse)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._assign(statement.targets[0].id, statement.value)
                self._calls(statement.value)
            else:
                self._calls(statement)

    def _assign(self, name: str, value: ast.expr) -> None:
        if _SIZES.match(name):
            size = _constant(value)
            if size is not None:
                self.sizes[name] = size
            return
        found = self._as_digits(value)
        if found is not None:
            self.digits[name] = found
        else:
            self.digits.pop(name, None)

    def _as_digits(self, value: ast.expr) -> Digits | None:
        """An index, digits of it, or digits of digits."""
        if isinstance(value, ast.Name):
            loop = _LOOPS.match(value.id)
            if loop is not None:
                size = self.sizes.get(f"{loop[1]}numel")
                return None if size is None else Digits(loop[1], 1, max(size, 1))
            return self.digits.get(value.id)
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, (ast.Mod, ast.FloorDiv)):
            return None
        inner, number = self._as_digits(value.left), _constant(value.right)
        if inner is None or not number or number < 1:
            return None
        if isinstance(value.op, ast.Mod):
            return inner._replace(extent=min(inner.extent, number))
        return Digits(inner.loop, inner.divisor * number, -(-inner.extent // number))

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
        count = self._places(place.right) if all(_covers_all(item) for item in masks) else None
        if count is None:
            self.complete = False
            return
        name = place.left.id
        if into is self.read and name in self.written:  # its own result once more
            return
        into[name] = max(into.get(name, 0), count)

    def _places(self, index: ast.expr) -> int | None:
        """How many different values a sum of digits has at the least; None where it is something else."""
        terms: list[tuple[int, Digits]] = []
        if not self._terms(index, 1, terms):
            return None
        terms = [(abs(factor), digits) for factor, digits in terms if digits.extent > 1 and factor]
        if not terms:
            return 1
        if any(_overlap(one, other) for at, (_, one) in enumerate(terms) for _, other in terms[:at]):
            return max(digits.extent for _, digits in terms)
        places, reach = 1, 0
        for factor, digits in sorted(terms):
            if factor > reach:
                places *= digits.extent
            else:  # the same place can be reached in more than one way
                places = max(places, digits.extent)
            reach += factor * (digits.extent - 1)
        sizes = {digits.loop: self.sizes[f"{digits.loop}numel"] for _, digits in terms}
        return min(places, max(1, math.prod(sizes.values())))

    def _terms(self, node: ast.expr, factor: int, terms: list[tuple[int, Digits]]) -> bool:
        if _constant(node) is not None:
            return True
        found = self._as_digits(node)
        if found is not None:
            terms.append((factor, found))
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._terms(node.operand, -factor, terms)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Add, ast.Sub)):
                sign = 1 if isinstance(node.op, ast.Add) else -1
                return self._terms(node.left, factor, terms) and self._terms(node.right, sign * factor, terms)
            if isinstance(node.op, ast.Mult):
                for number, rest in ((node.left, node.right), (node.right, node.left)):
                    value = _constant(number)
                    if value is not None:
                        return self._terms(rest, factor * value, terms)
        if isinstance(node, ast.Call):  # `tl.full([1], 0, tl.int32).broadcast_to(...)` is how a scalar is stored
            return _is_scalar(node)
        return False


def _overlap(one: Digits, other: Digits) -> bool:
    """Whether two come from the same digits of one index, so that they do not vary on their own."""
    if one.loop != other.loop:
        return False
    low, high = sorted((one, other), key=lambda digits: digits.divisor)
    return low.divisor * low.extent > high.divisor


def _is_scalar(node: ast.Call) -> bool:
    inner = node
    while isinstance(inner.func, ast.Attribute) and isinstance(inner.func.value, ast.Call):
        inner = inner.func.value
    return isinstance(inner.func, ast.Attribute) and inner.func.attr == "full"


def _covers_all(mask: ast.expr) -> bool:
    """Whether a mask only cuts off what is beyond the ends of the loops."""
    if isinstance(mask, ast.Constant):
        return mask.value is None
    if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        return _covers_all(mask.left) and _covers_all(mask.right)
    return isinstance(mask, ast.Name) and _MASKS.match(mask.id) is not None


def _constant(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _constant(node.operand)
        return None if inner is None else -inner
    return None
