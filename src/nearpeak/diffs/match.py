"""`matched`: the ops of two runs that do the same work, from the surest match to the loosest.

same op    the same operator on the same shapes, in the same phase and module; layers of a model are alike
moved      the same operator on the same shapes in other modules: renamed, or compiled as a whole
reshaped   the same operator in the same module, as often, on other shapes: another batch size, say
replaced   other operators that do the work of the ones before: as many FLOPs of a product, or what is left of one
           module, or of one phase and kind of work, where both take comparable time
only before, only after   what nothing of the other run stands for
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nearpeak.profiles.profile import Profile, ProfiledOp

Relation = Literal["same op", "moved", "reshaped", "replaced", "only before", "only after"]
ModulePath = tuple[str, ...]

MAX_TIME_RATIO = 4.0
"""How many times as long one side may take to be called the replacement of the other."""
MAX_TIME_RATIO_RESHAPED = 16.0
"""The same for other shapes of an op, and where a whole phase is compiled, which may save most memory traffic."""
PRODUCT_FAMILIES = ("matrix", "attention", "convolution", "recurrent")
"""Families whose FLOPs tell one op from another."""
_NUMBERED = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Ops of both runs; where one is an op of the other, in the same order and as many."""

    how: Relation
    before: Sequence[ProfiledOp]
    after: Sequence[ProfiledOp]

    @property
    def is_one_to_one(self) -> bool:
        """Whether each op is compared with one op that does exactly its work."""
        return self.how in ("same op", "moved")

    @property
    def before_s(self) -> float:
        """The kernel time of the earlier run."""
        return sum(op.compared_s for op in self.before)

    @property
    def after_s(self) -> float:
        """The kernel time of the later run."""
        return sum(op.compared_s for op in self.after)


def match_ops(before: Profile, after: Profile) -> list[Match]:
    """All ops that ran on the device, each in one match."""
    left = _Unmatched(before=_device_ops(before), after=_device_ops(after))
    # a module may have ops of the same name and shapes on other dtypes, which are other kernels: bytes tell
    found = list(
        left.take(
            "same op",
            lambda op: (operator_name(op), op.phase, _operands(op), module_pattern(op), op.bytes),
            _same_count,
        )
    )
    found += left.take("same op", lambda op: (operator_name(op), op.phase, _operands(op), module_pattern(op)))
    found += left.take("moved", lambda op: (operator_name(op), op.phase, _operands(op)))
    found += left.take(
        "reshaped", lambda op: (operator_name(op), op.phase, module_pattern(op)), _same_count_and_comparable
    )
    found += left.take("moved", lambda op: (operator_name(op), op.phase, op.flops), among=_is_product)
    found += left.take("replaced", lambda op: (op.family, op.phase, op.flops), _same_count, among=_is_product)
    found += left.take(
        "reshaped", lambda op: (operator_name(op), op.phase), _same_count_and_comparable, among=_is_product
    )
    for depth in range(max((len(module_pattern(op)) for op in left.before + left.after), default=0), 0, -1):
        found += left.take(
            "replaced",
            lambda op: (op.phase, module_pattern(op)[:depth]),  # it is called before the next depth  # noqa: B023  # it is called before the next depth
            _comparable if depth > 1 else _both_eager,
            among=lambda op: _shallowest(module_pattern(op)) <= depth <= len(module_pattern(op)),  # noqa: B023
        )
    found += left.take("replaced", lambda op: (op.phase, kind_of_work(op)), _one_side_compiled)
    for group in _group_by(left.before, _loose_key).values():
        found.append(Match(how="only before", before=group, after=()))
    for group in _group_by(left.after, _loose_key).values():
        found.append(Match(how="only after", before=(), after=group))
    return found


def operator_name(op: ProfiledOp) -> str:
    """An operator without its overload; a kernel of Inductor's without the number that it has in one compilation."""
    if op.name.startswith("inductor."):
        return _NUMBERED.sub("", op.name)
    return op.name.rpartition(".")[0] if op.name.count(".") > 1 else op.name


def module_pattern(op: ProfiledOp) -> ModulePath:
    """The module with a star for each number: the layers of a model are alike."""
    return tuple("*" if part.isdigit() else part for part in op.module.split("."))


def kind_of_work(op: ProfiledOp) -> str:
    """Products, the optimizer, or what moves memory: what can stand for each other when a step is compiled."""
    if op.family in PRODUCT_FAMILIES:
        return "products"
    return op.family if op.family in ("optimizer", "collective") else "memory"


class _Unmatched:
    """The ops that have no match yet."""

    def __init__(self, *, before: list[ProfiledOp], after: list[ProfiledOp]) -> None:
        self.before, self.after = before, after

    def take(
        self,
        how: Relation,
        key: Callable[[ProfiledOp], Hashable],
        accept: Callable[[Sequence[ProfiledOp], Sequence[ProfiledOp]], bool] = lambda before, after: True,
        *,
        among: Callable[[ProfiledOp], bool] = lambda op: True,
    ) -> Iterator[Match]:
        """The matches by a key, as they are found; all of them must be asked for."""
        first = _group_by([op for op in self.before if among(op)], key)
        second = _group_by([op for op in self.after if among(op)], key)
        taken: set[int] = set()
        for one in first:
            here, there = first[one], second.get(one, [])
            if not there or not accept(here, there):
                continue
            if how != "replaced":  # where there are more of them in one run, these are new, or gone
                shared = min(len(here), len(there))
                here, there = here[:shared], there[:shared]
            taken.update(map(id, here))
            taken.update(map(id, there))
            yield Match(how=how, before=here, after=there)
        self.before = [op for op in self.before if id(op) not in taken]
        self.after = [op for op in self.after if id(op) not in taken]


def _device_ops(profile: Profile) -> list[ProfiledOp]:
    return [op for op in profile.ops if op.kernels]


def _operands(op: ProfiledOp) -> tuple[tuple[int, ...], ...]:
    """Its shapes without that of a result that is given to it, as compiled code does."""
    return op.shapes[:-1] if op.name.endswith(".out") else op.shapes


def _is_product(op: ProfiledOp) -> bool:
    return op.family in PRODUCT_FAMILIES and op.flops > 0.0


def _shallowest(modules: ModulePath) -> int:
    """Down to how many parts a path may be cut: not beyond its layer, and never to the whole model."""
    layers = [at for at, part in enumerate(modules) if part == "*"]
    return layers[-1] + 1 if layers else min(2, len(modules))


def _same_count(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    return len(before) == len(after)


def _same_count_and_comparable(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    """Other shapes may take far longer, but not as much as something else would."""
    return len(before) == len(after) and _comparable(before, after, MAX_TIME_RATIO_RESHAPED)


def _comparable(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp], most: float = MAX_TIME_RATIO) -> bool:
    short, long = sorted(sum(op.compared_s for op in ops) for ops in (before, after))
    return long <= most * short


def _both_eager(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    """In the whole model itself: compiled code has all its kernels there, which replace more than what was there."""
    return _comparable(before, after) and not any(map(_is_compiled, (*before, *after)))


def _one_side_compiled(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    """One side is compiled, so that modules and lines do not tell what replaces what; or it is the optimizer."""
    if before[0].family == "optimizer":
        return _comparable(before, after)
    ours, theirs = (any("." not in op.module for op in ops) for ops in (before, after))
    compiled = any(map(_is_compiled, before)) != any(map(_is_compiled, after))
    return (compiled or ours != theirs) and _comparable(before, after, MAX_TIME_RATIO_RESHAPED)


def _is_compiled(op: ProfiledOp) -> bool:
    return op.name.startswith("inductor.")


def _loose_key(op: ProfiledOp) -> Hashable:
    return operator_name(op), op.phase, module_pattern(op)


def _group_by(ops: Iterable[ProfiledOp], key: Callable[[ProfiledOp], Hashable]) -> dict[Hashable, list[ProfiledOp]]:
    found: dict[Hashable, list[ProfiledOp]] = {}
    for op in ops:
        found.setdefault(key(op), []).append(op)
    return found
