"""`Loop`: a loop of the user's code, seen in the ops of a step: the same lines run turn after turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.profiles.idle import IdleCause

if TYPE_CHECKING:
    from nearpeak.findings.step import Step  # which has the loops of its ops

MIN_TURNS = 4
"""Fewer repetitions may be one formula with similar terms."""
_MAX_FOREIGN = 0.15
"""Of the ops of a turn, the share that other turns do not have: a branch that only some turns take."""

_BRANCH_LINES = 2
"""A branch has its lines at most so many after that of its condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop at some lines. A function that is called several times runs it several times."""

    runs: tuple[tuple[tuple[int, ...], ...], ...]
    """For each run of the loop its turns, each with the indices of its ops in order."""

    @property
    def turns(self) -> list[tuple[int, ...]]:
        """The turns of all runs."""
        return [turn for run in self.runs for turn in run]

    @property
    def members(self) -> list[int]:
        """The ops of all turns."""
        return [index for run in self.runs for turn in run for index in turn]


def find_loops(ops: Sequence[Op]) -> tuple[Loop, ...]:
    """The loops among ops that have source lines, the first to start first; an inner loop follows its outer one.

    The first op of a turn recurs at the start of each turn, and what lies between is alike: nearly all of it is at
    lines and of operators that an ordinary turn has too. Modules and shapes may differ from turn to turn. A turn that
    ends early (`continue`) is one too.
    """
    keys: list[Hashable] = [(op.name, op.source, op.phase) if op.source else None for op in ops]
    positions: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        if key is not None:
            positions.setdefault(key, []).append(index)
    loops: list[Loop] = []
    turns_of: dict[int, list[tuple[int, int]]] = {}
    """For each op, the loops that it is in, with the number of the turn."""
    for starts in positions.values():
        if len(starts) < MIN_TURNS or _is_explained(starts, turns_of):
            continue
        found = _from_first_op(keys, list(_runs(keys, starts)))
        runs = tuple(tuple(tuple(range(*turn)) for turn in run) for run in found)
        if not runs:
            continue
        for number, turn in enumerate(turn for run in runs for turn in run):
            for index in turn:
                turns_of.setdefault(index, []).append((len(loops), number))
        loops.append(Loop(runs=runs))
    return tuple(loops)


def _is_explained(starts: Sequence[int], turns_of: dict[int, list[tuple[int, int]]]) -> bool:
    """Whether ops of one key are once in each turn of a loop that is known."""
    by_loop: dict[int, list[int]] = {}
    for start in starts:
        for loop, turn in turns_of.get(start, ()):
            by_loop.setdefault(loop, []).append(turn)
    return any(len(turns) == len(set(turns)) >= len(starts) - 1 for turns in by_loop.values())


def _runs(keys: Sequence[Hashable], starts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The runs of a loop whose turns begin at some of `starts`, each a list of start and end of a turn."""
    bodies = [frozenset(keys[start:end]) for start, end in pairwise(starts)]
    counts = Counter(bodies)
    ordinary = max(counts, key=lambda body: (counts[body], len(body)))
    if counts[ordinary] < 2 and len(bodies) > 2:
        ordinary = sorted(bodies, key=len)[len(bodies) // 2]
    run: list[tuple[int, int]] = []
    for start, end in zip(starts, (*starts[1:], len(keys)), strict=True):
        own = start
        while own < end and keys[own] in ordinary:
            own += 1
        foreign = [key for key in keys[own:end] if key not in ordinary]
        has_branch = ordinary.issubset(keys[start:end]) and _is_branch(foreign, ordinary)
        if end < len(keys) and (len(foreign) <= _MAX_FOREIGN * (end - start) or has_branch):
            run.append((start, end))
            continue
        run.append((start, own))  # the last turn: something else follows
        if len(run) >= MIN_TURNS:
            yield run
        run = []
    if len(run) >= MIN_TURNS:
        yield run


def _is_branch(foreign: Sequence[Hashable], ordinary: Collection[Hashable]) -> bool:
    """Whether ops are at lines of a branch that few turns take: right after lines of an ordinary turn."""
    lines = {_line(key) for key in ordinary}
    return all(
        (file, number) not in lines and any((file, number - back) in lines for back in range(1, _BRANCH_LINES + 1))
        for file, number in map(_line, foreign)
    )


def _line(key: Hashable) -> tuple[str, int]:
    file, _, number = key[1].rpartition(":") if isinstance(key, tuple) else ("", "", "")
    return file, int(number) if number.isdigit() else 0


def _from_first_op(keys: Sequence[Hashable], runs: Sequence[list[tuple[int, int]]]) -> Iterator[list[tuple[int, int]]]:
    """The runs with turns that begin with their first op, which may be one that a turn has twice.

    Turns begin at an op that each has once. What precedes the first turn, and is what the other turns end with, belongs
    to the beginning of the turns.
    """
    free = 0
    for run in runs:
        (start, end), earlier = run[0], 0
        while (
            start - earlier > free
            and earlier < end - start - 1
            and keys[start - earlier - 1] == keys[end - earlier - 1]
        ):
            earlier += 1
        free = run[-1][1]
        yield [(first - earlier, last - earlier) for first, last in run[:-1]] + [(run[-1][0] - earlier, run[-1][1])]


def backward_of(step: Step, loop: Loop) -> list[int]:
    """The ops of the backward pass through a loop: they carry the lines and modules of their forward ops.

    Lines that run outside of the loop too, such as those of a function that others call, count in modules that run in
    the loop alone.
    """
    inside = set(loop.members)
    outside = [op for index, op in enumerate(step.ops) if index not in inside and op.phase != "backward"]
    lines = {step.ops[index].source for index in inside} - {op.source for op in outside} - {""}
    places = {(step.ops[index].source, step.ops[index].module) for index in inside}
    places -= {(op.source, op.module) for op in outside}
    return [
        index
        for index, op in enumerate(step.ops)
        if op.phase == "backward" and index not in inside and (op.source in lines or (op.source, op.module) in places)
    ]


def batched_seconds(step: Step, members: Collection[int]) -> float:
    """The time of ops if those of one line and operator ran as one op: a loop whose turns do not need each other.

    It does not take longer than the ops did.
    """
    groups: dict[Hashable, list[int]] = {}
    for index in members:
        op = step.ops[index]
        groups.setdefault((op.name, op.source, op.phase), []).append(index)
    return sum(min(step.seconds(group), _one_op_seconds(step, group)) for group in groups.values())


def _one_op_seconds(step: Step, group: Sequence[int]) -> float:
    reads: list[Access] = []
    writes: list[Access] = []
    flops: dict[str, float] = {}
    for index in group:
        cost = step.costs[index]
        reads += cost.reads
        writes += cost.writes
        for dtype, count in cost.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    family = step.costs[group[0]].family
    if family != "matrix":
        return step.expected_for_work(_distinct(step, reads), _distinct(step, writes), kind=family)
    memory_s = step.expected_for_work(_distinct(step, reads), _distinct(step, writes), kind="matrix/memory")
    return max(memory_s, step.expected_for_work((), (), flops, kind="matrix/compute"))


def _distinct(step: Step, accesses: Sequence[Access]) -> list[Access]:
    """The accesses with those of one storage as one: a weight that all turns read, or the parts of a tensor."""
    sizes: dict[int, float] = {}
    for access in accesses:
        sizes[access.storage] = sizes.get(access.storage, 0.0) + access.bytes
    storages = step.trace.storages
    return [
        Access(storage=storage, bytes=min(size, storages[storage].bytes) if storage in storages else size)
        for storage, size in sizes.items()
    ]


def replacement_claims(
    step: Step, members: Collection[int], remaining_s: float, *, launches: int = 1
) -> tuple[dict[int, float], list[int]]:
    """What a `Waste` gains, and the ops that are gone, if `launches` ops that take `remaining_s` replace ops.

    The time of the ops is saved, and the host's time to launch them. If what replaces them takes longer than the ops
    themselves, since it is bound by the host too, the launches of some of them stay.
    """
    took_s = step.seconds(members)
    ordered = sorted(members)
    calls = [index for index in ordered if step.costs[index].family != "view"]
    stay = set(calls[:launches])
    share = 1 - remaining_s / took_s if took_s > remaining_s else 0.0
    if took_s <= remaining_s:
        share = 0.999  # an op whose whole time is gained would be gone
        waits_left_s = remaining_s - took_s
        for index in calls[launches:]:
            if waits_left_s <= 0.0:
                break
            waits_left_s -= step.measured[index].launch_wait_s
            stay.add(index)
    gains = {index: share * step.time(index) for index in ordered if step.time(index)}
    return gains, [index for index in ordered if index not in stay]


def python_between_turns(step: Step, loop: Loop) -> tuple[IdleCause, ...]:
    """The idle time in which Python ran at the lines of a loop on a CPU. A GPU waits for launches, which go with their
    ops."""
    places = {step.ops[index].place for index in loop.members} - {""} if step.machine.kind == "cpu" else set()
    return tuple(cause for cause in step.idle_causes("python") if cause.where in places and cause.count > 1)


def line_range(lines: Sequence[str]) -> str:
    """Lines as text, those of one file as a range.

    >>> line_range(["train.py:55", "train.py:41", "model.py:7"])
    'train.py:41-55, model.py:7'
    """
    by_file: dict[str, list[int]] = {}
    for line in lines:
        file, _, number = line.rpartition(":")
        if number.isdigit():
            by_file.setdefault(file, []).append(int(number))
    return ", ".join(
        f"{file}:{min(numbers)}" + (f"-{max(numbers)}" if len(set(numbers)) > 1 else "")
        for file, numbers in by_file.items()
    )
