"""`match_ops`: the ops of two runs that do the same work, from the strictest relation to the loosest.

same op    the same operator on the same shapes, in the same phase and module; the layers of a model are alike
moved      the same operator on the same shapes in other modules: renamed, or compiled as a whole
reshaped   the same operator in the same module, equally often, on other shapes: another batch size, for example
replaced   other operators that do the work of the earlier ones: GEMMs with as many FLOPs, or what is left of one
           module, or of one phase and kind of work, if both take comparable time
only before, only after   no counterpart in the other run
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
"""Between the times of two sides of which one replaces the other."""
MAX_TIME_RATIO_RESHAPED = 16.0
"""The same for other shapes of an op, and for a whole compiled phase, which may save most memory traffic."""
PRODUCT_FAMILIES = ("matrix", "attention", "convolution", "recurrent")
"""Families in which the number of FLOPs identifies an op."""
_NUMBER_SUFFIX = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Ops of both runs. One-to-one matches have equally many on both sides, in the same order."""

    relation: Relation
    before: Sequence[ProfiledOp]
    after: Sequence[ProfiledOp]

    @property
    def is_one_to_one(self) -> bool:
        """Whether each op has one counterpart that does exactly its work."""
        return self.relation in ("same op", "moved")

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
    # A module may have ops of one name and shape on different dtypes, which are different kernels: bytes tell.
    matches = list(
        left.take(
            "same op",
            lambda op: (operator_name(op), op.phase, _operands(op), module_pattern(op), op.bytes),
            _same_count,
        )
    )
    matches += left.take("same op", lambda op: (operator_name(op), op.phase, _operands(op), module_pattern(op)))
    matches += left.take("moved", lambda op: (operator_name(op), op.phase, _operands(op)))
    matches += left.take(
        "reshaped", lambda op: (operator_name(op), op.phase, module_pattern(op)), _same_count_and_comparable
    )
    matches += left.take("moved", lambda op: (operator_name(op), op.phase, op.flops), among=_is_product)
    matches += left.take("replaced", lambda op: (op.family, op.phase, op.flops), _same_count, among=_is_product)
    matches += left.take(
        "reshaped", lambda op: (operator_name(op), op.phase), _same_count_and_comparable, among=_is_product
    )
    for depth in range(max((len(module_pattern(op)) for op in left.before + left.after), default=0), 0, -1):
        matches += left.take(
            "replaced",
            lambda op: (op.phase, module_pattern(op)[:depth]),  # noqa: B023  # called before the next depth
            _comparable if depth > 1 else _both_eager,
            among=lambda op: _min_depth(module_pattern(op)) <= depth <= len(module_pattern(op)),  # noqa: B023
        )
    matches += left.take("replaced", lambda op: (op.phase, kind_of_work(op)), _one_side_compiled)
    for ops in _group_by(left.before, _loose_key).values():
        matches.append(Match(relation="only before", before=ops, after=()))
    for ops in _group_by(left.after, _loose_key).values():
        matches.append(Match(relation="only after", before=(), after=ops))
    return matches


def common_shares(before: Profile, after: Profile) -> tuple[float, float]:
    """Of the kernel time of each run, the share of ops that the other has too, whatever their number and time.

    The other run has an op if it has the operator on the same shapes, or on any shapes in the same module or, outside
    of modules, file. If one run is compiled, only products are compared, by the model: fusion leaves no other op.
    """
    runs, identities = [_device_ops(before), _device_ops(after)], _identities
    if any(map(_is_compiled, runs[0])) != any(map(_is_compiled, runs[1])):
        runs, identities = [[op for op in ops if _is_product(op)] for ops in runs], _model_identities
    keys = [{key for op in ops for key in identities(op)} for ops in runs]
    shares = []
    for ops, others in zip(runs, reversed(keys), strict=True):
        total_s = sum(op.compared_s for op in ops)
        common_s = sum(op.compared_s for op in ops if not others.isdisjoint(identities(op)))
        shares.append(common_s / total_s if total_s else 1.0)
    return shares[0], shares[1]


def _identities(op: ProfiledOp) -> Iterator[Hashable]:
    name = operator_name(op)
    yield name, op.phase, _operands(op)
    if op.module or op.source:
        yield name, op.phase, module_pattern(op) if op.module else op.source.rpartition(":")[0]


def _model_identities(op: ProfiledOp) -> Iterator[Hashable]:
    yield op.family, op.phase, op.flops
    yield op.family, op.phase, op.module.partition(".")[0] or op.source.rpartition(":")[0]


def operator_name(op: ProfiledOp) -> str:
    """An operator without its overload; a kernel of Inductor's without its number in one compilation."""
    if op.origin == "inductor":
        return _NUMBER_SUFFIX.sub("", op.name)
    return op.name.rpartition(".")[0] if op.name.count(".") > 1 else op.name


def module_pattern(op: ProfiledOp) -> ModulePath:
    """The module path with a star for each number: the layers of a model are alike."""
    return tuple("*" if part.isdigit() else part for part in op.module.split("."))


def kind_of_work(op: ProfiledOp) -> str:
    """Products, the optimizer, or memory traffic: what can replace each other when a step is compiled."""
    if op.family in PRODUCT_FAMILIES:
        return "products"
    return op.family if op.family in ("optimizer", "collective") else "memory"


class _Unmatched:
    """The ops without a match so far."""

    def __init__(self, *, before: list[ProfiledOp], after: list[ProfiledOp]) -> None:
        self.before, self.after = before, after

    def take(
        self,
        relation: Relation,
        key: Callable[[ProfiledOp], Hashable],
        accept: Callable[[Sequence[ProfiledOp], Sequence[ProfiledOp]], bool] = lambda before, after: True,
        *,
        among: Callable[[ProfiledOp], bool] = lambda op: True,
    ) -> Iterator[Match]:
        """Takes the ops with equal keys as matches. The iterator must be exhausted."""
        first = _group_by([op for op in self.before if among(op)], key)
        second = _group_by([op for op in self.after if among(op)], key)
        matched: set[int] = set()
        for group in first:
            before, after = first[group], second.get(group, [])
            if not after or not accept(before, after):
                continue
            if relation != "replaced":  # additional ops in one of the runs are new, or gone
                shared = min(len(before), len(after))
                before, after = before[:shared], after[:shared]
            matched.update(map(id, before))
            matched.update(map(id, after))
            yield Match(relation=relation, before=before, after=after)
        self.before = [op for op in self.before if id(op) not in matched]
        self.after = [op for op in self.after if id(op) not in matched]


def _device_ops(profile: Profile) -> list[ProfiledOp]:
    return [op for op in profile.ops if op.kernels]


def _operands(op: ProfiledOp) -> tuple[tuple[int, ...], ...]:
    """Its shapes without that of an `out` argument, which compiled code passes."""
    return op.shapes[:-1] if op.name.endswith(".out") else op.shapes


def _is_product(op: ProfiledOp) -> bool:
    return op.family in PRODUCT_FAMILIES and op.flops > 0.0


def _min_depth(modules: ModulePath) -> int:
    """The length to which a path may be cut: never above its layer, and never to the whole model."""
    layers = [depth for depth, part in enumerate(modules) if part == "*"]
    return layers[-1] + 1 if layers else min(2, len(modules))


def _same_count(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    return len(before) == len(after)


def _same_count_and_comparable(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    """Other shapes may take far longer, but not as much longer as something else would."""
    return len(before) == len(after) and _comparable(before, after, MAX_TIME_RATIO_RESHAPED)


def _comparable(
    before: Sequence[ProfiledOp], after: Sequence[ProfiledOp], max_time_ratio: float = MAX_TIME_RATIO
) -> bool:
    short, long = sorted(sum(op.compared_s for op in ops) for ops in (before, after))
    return long <= max_time_ratio * short


def _both_eager(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    """For ops of the model itself: all compiled kernels are there, and replace more than what was there before."""
    return _comparable(before, after) and not any(map(_is_compiled, (*before, *after)))


def _one_side_compiled(before: Sequence[ProfiledOp], after: Sequence[ProfiledOp]) -> bool:
    """One side is compiled, so that modules and lines do not say what replaces what; or it is the optimizer."""
    if before[0].family == "optimizer":
        return _comparable(before, after)
    outside_before, outside_after = (any("." not in op.module for op in ops) for ops in (before, after))
    compiled = any(map(_is_compiled, before)) != any(map(_is_compiled, after))
    return (compiled or outside_before != outside_after) and _comparable(before, after, MAX_TIME_RATIO_RESHAPED)


def _is_compiled(op: ProfiledOp) -> bool:
    return op.origin == "inductor"


def _loose_key(op: ProfiledOp) -> Hashable:
    return operator_name(op), op.phase, module_pattern(op)


def _group_by(ops: Iterable[ProfiledOp], key: Callable[[ProfiledOp], Hashable]) -> dict[Hashable, list[ProfiledOp]]:
    groups: dict[Hashable, list[ProfiledOp]] = {}
    for op in ops:
        groups.setdefault(key(op), []).append(op)
    return groups
