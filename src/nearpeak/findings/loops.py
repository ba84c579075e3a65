"""`Loop`: a loop of the user's code, seen in the ops of a step: the same lines run turn after turn."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.profiles.idle import IdleCause

if TYPE_CHECKING:
    from nearpeak.findings.step import Step  # which has the loops of its ops

ADDITIONS = ("aten.add", "aten.add_")
"""Operators with which autograd adds up gradients."""
MIN_TURNS = 4
"""Fewer repetitions may be one formula with similar terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop at a line. A function that is called several times runs it several times."""

    line: str
    number: int
    """There may be several loops at one line."""
    runs: tuple[tuple[tuple[int, ...], ...], ...]
    """For each run of the loop its turns, each with the indices of its ops in order."""
    backward: tuple[tuple[tuple[int, ...], ...], ...]
    """The same for the backward pass: the ops behind which are those of the turns."""

    @property
    def turns(self) -> list[tuple[int, ...]]:
        """The turns of all runs."""
        return [turn for run in self.runs for turn in run]

    @property
    def members(self) -> list[int]:
        """The ops of all turns."""
        return [index for run in self.runs for turn in run for index in turn]

    @property
    def backward_members(self) -> list[int]:
        """The ops of the backward pass through the loop, in order."""
        return sorted(index for run in self.backward for turn in run for index in turn)


def find_loops(ops: Sequence[Op]) -> tuple[Loop, ...]:
    """The loops of the user's code around the ops, the first to start first; an inner loop follows its outer one."""
    lines: dict[tuple[str, int], dict[int, dict[int, tuple[list[int], list[int]]]]] = {}
    """By the line and number of a loop, the number of its run and of its turn: the ops of the turn, and those
    backward."""
    for index, op in enumerate(ops):
        for loop, number, run, turn, _ in op.turns:
            members = lines.setdefault((loop, number), {}).setdefault(run, {}).setdefault(turn, ([], []))
            members[op.phase == "backward"].append(index)
    loops: list[Loop] = []
    for (line, number), by_run in lines.items():
        runs = [[by_run[run][turn] for turn in sorted(by_run[run])] for run in sorted(by_run)]
        runs = [[turn for turn in run if turn[0]] for run in runs]
        runs = [run for run in runs if len(run) >= MIN_TURNS]
        if runs:
            forward, backward = (
                tuple(tuple(tuple(turn[part]) for turn in run) for run in runs) for part in (False, True)
            )
            loops.append(Loop(line=line, number=number, runs=forward, backward=backward))
    return tuple(loops)


def gradients_added(step: Step, loop: Loop) -> tuple[set[int], set[int]]:
    """The ops that add up gradients of different turns, and the others whose results they add.

    Each turn that reads a part of a tensor, or all of it, has a gradient of the whole tensor. One op on all items has
    one gradient.
    """
    turn_of = {
        index: (number, place)
        for number, run in enumerate(loop.backward)
        for place, turn in enumerate(run)
        for index in turn
    }
    added = {
        index
        for index, turn in turn_of.items()
        if step.ops[index].packet in ADDITIONS
        and any(turn_of.get(producer, turn) != turn for producer in step.flow.producers[index].values())
    }
    return added, {producer for index in added for producer in step.flow.producers[index].values()} - added


def batched_seconds(step: Step, members: Collection[int]) -> float:
    """The time of ops if those of one line and operator ran as one op: a loop whose turns do not need each other.

    It does not take longer than the ops did.
    """
    groups: dict[Hashable, list[int]] = {}
    for index in members:
        op = step.ops[index]
        groups.setdefault((op.name, op.source, op.phase), []).append(index)
    return sum(min(step.seconds(group), one_op_seconds(step, group)) for group in groups.values())


def one_op_seconds(step: Step, group: Sequence[int], *, are_added: bool = False) -> float:
    """The time of a good kernel that does the work of several ops of one operator; with `are_added`, their results are
    added up, and it writes one."""
    reads: list[Access] = []
    writes: list[Access] = []
    flops: dict[str, float] = {}
    for index in group:
        cost = step.costs[index]
        reads += cost.reads
        if not writes or not are_added:
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


def slowest_line(step: Step, loop: Loop) -> str:
    """The line in the function of the loop at which most time is spent."""
    times: dict[str, float] = {}
    python = step.trace.python or {}
    for index in loop.members:
        for turn in step.ops[index].turns:
            if turn.number == loop.number:
                took_s = step.time(index) + step.measured[index].launch_wait_s + 1e-9
                times[turn.line] = times.get(turn.line, 0.0) + took_s
                stacks = python[index].stacks if index in python else {}
                for stack, count in stacks.items():
                    here = next((item.line for item in stack if item.is_in_function_of(turn.line)), turn.line)
                    times[here] = times.get(here, 0.0) + python[index].seconds * count / sum(stacks.values())
    return max(times, key=lambda line: times[line])


def has_own_weights(step: Step, loop: Loop) -> bool:
    """Whether each turn has parameters that no other one has."""
    own = [parameters_of(step, turn) for turn in loop.runs[0]]
    return all(own) and sum(map(len, own)) == len(set().union(*own))


def parameters_of(step: Step, turn: Sequence[int]) -> set[int]:
    """The parameters that the ops of a turn read, by their storages."""
    read = {storage for index in turn for storage in step.flow.read_by[index]} & step.trace.storages.keys()
    return {storage for storage in read if step.trace.storages[storage].kind == "parameter"}


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
