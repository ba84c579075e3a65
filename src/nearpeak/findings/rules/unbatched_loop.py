"""A Python loop handles items one at a time, none of which needs a result of another: ops on all of them would do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule, wastes_of
from nearpeak.findings.experts import expert_loops
from nearpeak.findings.host_reads import is_read, reading_loops
from nearpeak.findings.liveness import gradient_sums
from nearpeak.findings.loops import (
    ADDITIONS,
    Loop,
    gradients_added,
    has_own_weights,
    one_op_seconds,
    parameters_of,
    slowest_line,
)
from nearpeak.findings.regions import launch_wait_seconds
from nearpeak.findings.step import FULL_MEMORY, Step
from nearpeak.findings.what_if import gemm_op, with_rows
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.idle import WORKERS_STARTED, IdleCause
from nearpeak.units import seconds

MIN_GAIN = 0.1
"""Of the time of the loop. Items that fill the machine gain nothing from company."""
_ORDINARY = 0.7
"""An op that this share of the turns has is one of an ordinary turn."""
_MIN_ALIKE = 0.8
"""The least share of the ops of a loop that are those of ordinary turns, with the same shapes but for one size."""
_MOSTLY_REPEATED = 0.5
"""A loop that spends this share of its time on what an earlier turn computed is not to be batched."""
_MOST_OF_OUTER = 0.5
"""An inner loop with more of the saving of an outer one is the one to change."""
_MAX_SLOWNESS = 3.0
"""The ops of a loop may be slower than good kernels because of their strides, which an op on all items has too; what is
slower than that is so because of something else."""
_SUMS = (
    *(f"aten.{name}{end}" for name in ("add", "sub", "mul", "maximum", "minimum", "logaddexp") for end in ("", "_")),
    *("aten.logical_or", "aten.logical_and", "aten.bitwise_or", "aten.index_add_", "aten.copy_"),
    *("aten.index_put_", "aten.scatter_add_"),
)
"""Operators that gather what the turns have computed, in any order: a sum, the largest."""

_KEPT = ("aten.cat", "aten.clone", "aten._to_copy", "aten.repeat")
_KEPT_IN_PLACE = ("aten.copy_", "aten.index_put_", "aten.index_copy_", "aten.scatter_", "aten.slice_scatter")
"""Operators that only move keys and values into a cache, and those that write there and read nothing of it."""
_ATTENTION = "aten._scaled_dot_product"
_FILLED = ("aten.full", "aten.fill", "aten.fill_", "aten.scalar_tensor", "aten.full_like", "aten.new_full")
"""Operators that make a tensor of a number of the host's."""

_LOADER_REMEDY = (
    "sampler = torch.utils.data.BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)\n"
    "DataLoader(dataset, batch_size=None, sampler=sampler)  # __getitem__ gets a list of rows, and takes all of them\n"
    "# or num_workers=4, persistent_workers=True, which do it beside the step"
)


_POSITIONS_REMEDY = (
    "logits = model(tokens, cache, start)  # all positions in one call, each attends to those before it:\n"
    "# a mask torch.arange(start + n) <= torch.arange(start, start + n)[:, None], or is_causal=True from position 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What of a loop can run for all turns at once."""

    loop: Loop
    is_whole: bool
    """Whether it is all of the loop, which goes, or a part that runs before the loop."""
    attends: bool
    """Whether turns attend to keys and values of the turns before, as one call of all positions does with a mask."""


@rule("unbatched-loop", needs=["storages", "lines"])
def unbatched_loop(step: Step) -> Iterator[Waste]:
    """Loops whose turns run the same ops and are independent but for sums, compared with one op for all turns.

    Turns may attend to keys and values of the turns before. Of a recurrence, the part of the turns that needs nothing
    of the turns before.
    """
    others = {index for experts in expert_loops(step) for index in experts.members}
    others |= {index for loop in reading_loops(step) for index in loop.members}
    parts = [_part_for_all(step, loop) for loop in step.loops if not others.intersection(loop.members)]
    batches = [_Batch.of(step, part) for part in parts if part is not None]
    again: set[int] | None = None
    for batch in batches:
        within = set(batch.members)
        overlapping = [other for other in batches if other is not batch and within.intersection(other.members)]
        if all(_is_preferred(batch, other) for other in overlapping) and batch.is_worth_it(step):
            again = _computed_again(step) if again is None else again
            repeated_s = step.seconds(again & within)
            if not repeated_s or repeated_s < _MOSTLY_REPEATED * step.seconds(within):
                yield batch.waste(step)


def _computed_again(step: Step) -> set[int]:
    """Ops that need not run once more, since they compute what an earlier one did: a batch of them is no remedy."""
    return {index for waste in wastes_of(step, "computed-twice") for index in waste.gains}


def _part_for_all(step: Step, loop: Loop) -> _Part | None:
    """The loop, or the part of its turns that does not need the turns before. None if nothing of it can run for all
    turns at once."""
    if any(step.ops[index].phase == "optimizer" or step.ops[index].origin == "inductor" for index in loop.members):
        return None
    if _saves_memory(step, loop) or _is_one_op_for_each_tensor(step, loop):  # which has rules of its own
        return None
    strictly = set().union(*(_needing_others(step, run) for run in loop.runs))
    if any(is_read(step.ops[index]) for index in strictly):  # what the turns before gave decides what runs
        return None
    caches = _caches(step, loop)
    needing = set().union(*(_needing_others(step, run, caches) for run in loop.runs)) if caches else strictly
    attends = len(needing) < len(strictly)
    are_sums = all(step.ops[index].packet in _SUMS or step.costs[index].family == "view" for index in needing)
    if attends and not _is_known_before(step, loop, caches):
        return None
    if attends and not are_sums:
        attends, needing = False, strictly
    part = loop if are_sums else _independent_part(step, loop, needing)
    if part is None or not _are_alike(step, part):
        return None
    return _Part(loop=part, is_whole=are_sums, attends=attends)


def _alternates(loop: Loop) -> bool:
    """Whether the backward pass of a turn runs before the forward pass of the next turn of the same run."""
    return any(
        back and max(back) < following[0]
        for run, backward in zip(loop.runs, loop.backward, strict=True)
        for back, following in zip(backward, run[1:], strict=False)
    )


def _saves_memory(step: Step, loop: Loop) -> bool:
    """Whether gradients are added up turn by turn, and what all turns would keep for one backward pass may not fit."""
    if not _alternates(loop):
        return False
    memory = step.profile.memory
    if memory is None or memory.capacity_bytes is None:
        return True
    written = {storage for index in loop.members for storage in step.flow.written_by[index]}
    kept_bytes = sum(step.trace.storages[storage].bytes for storage in written)
    return memory.peak_bytes + kept_bytes > FULL_MEMORY * memory.capacity_bytes


def _is_one_op_for_each_tensor(step: Step, loop: Loop) -> bool:
    """Whether a turn is one op, on a tensor that no other turn reads: there is an op for lists, or a wider product."""
    launched = [
        [index for index in turn if step.costs[index].family != "view"] for turn in (*loop.turns, loop.backward_members)
    ]
    if launched.pop() or any(len(turn) > 1 for turn in launched) or not any(launched):
        return False
    read = Counter(storage for turn in launched for index in turn for storage in set(step.flow.read_by[index]))
    return all(any(read[storage] == 1 for storage in step.flow.read_by[index]) for turn in launched for index in turn)


def _needing_others(step: Step, run: Sequence[Sequence[int]], caches: Collection[int] = ()) -> set[int]:
    """The ops that take something from the turns before; with `caches`, not if that are keys and values which these ops
    write, and to which other ones attend."""
    earlier: dict[int, _Writers] = {}
    """By storage, the ops of the turns before that wrote to it."""
    needing: set[int] = set()
    for turn in run:
        own: dict[int, list[int]] = {}
        """By storage, the ops of this turn that wrote to it."""
        for index in turn:
            op = step.ops[index]
            attended = _attended(op)
            for read in _read_tensors(op) if step.costs[index].family != "view" else ():
                before = own.get(read.storage, [])
                if any(writer in needing for writer in before):
                    needing.add(index)
                elif before and _has_all_of(read, step.ops[before[-1]]):
                    continue
                elif read.storage in earlier:
                    attends = index in caches or read.storage in attended
                    writers = earlier[read.storage].of(read)
                    if any(not attends or writer not in caches or writer in needing for writer in writers):
                        needing.add(index)
            for storage in step.flow.written_by[index]:
                own.setdefault(storage, []).append(index)
        for storage, writers_of in own.items():
            for index in writers_of:
                earlier.setdefault(storage, _Writers()).add(index, step.ops[index], storage)
    return needing


class _Writers:
    """The ops that wrote to a storage."""

    def __init__(self) -> None:
        self._by_layout: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, tuple[int, Tensor]]] = {}

    def add(self, index: int, op: Op, storage: int) -> None:
        for tensor in op.written:
            if tensor.storage == storage:
                self._by_layout.setdefault((tensor.shape, tensor.strides), {})[tensor.offset] = index, tensor

    def of(self, read: Tensor) -> Iterator[int]:
        """Those that wrote elements of a tensor, as far as offsets tell."""
        for layout, writers in self._by_layout.items():
            if layout == (read.shape, read.strides):  # two rows or columns, or the same
                if read.offset in writers:
                    yield writers[read.offset][0]
            else:
                yield from (index for index, written in writers.values() if not _are_apart(read, written))


def _attended(op: Op) -> set[int]:
    """The storages that an op reads as keys or values of attention alone."""
    if not op.packet.startswith(_ATTENTION):
        return set()
    kept = op.tensors("key", "value")
    others = [tensor.storage for tensor in op.inputs if all(tensor is not item for item in kept)]
    return {tensor.storage for tensor in kept} - set(others)


def _caches(step: Step, loop: Loop) -> set[int]:
    """The ops of a loop that write what it reads as keys and values of attention alone."""
    caches: set[int] = set()
    inside = set(loop.members)
    candidates = [index for index in loop.members if step.ops[index].packet in (*_KEPT, *_KEPT_IN_PLACE)]
    reads: dict[int, list[int]] = {}
    for index in loop.members:
        if step.costs[index].family != "view":
            for storage in {tensor.storage for tensor in _read_tensors(step.ops[index])}:
                reads.setdefault(storage, []).append(index)
    for index in reversed(candidates):  # what is made of it comes later, or is a cache that grows from turn to turn
        readers = {reader for storage in step.flow.written_by[index] for reader in reads.get(storage, ())} & inside
        if readers and all(
            reader in caches or set(step.flow.written_by[index]) & _attended(step.ops[reader]) for reader in readers
        ):
            caches.add(index)
    return caches


def _is_known_before(step: Step, loop: Loop, caches: Collection[int]) -> bool:
    """Whether no turn reads what the host made for it, which may come from the turns before."""
    turns_of: dict[int, set[tuple[int, int]]] = {}
    for number, run in enumerate(loop.runs):
        for place, turn in enumerate(run):
            for index in turn:
                op = step.ops[index]
                if op.packet in _FILLED and not op.outputs[0].dtype.startswith(("float", "bfloat")):
                    return False
                given = set(step.flow.read_by[index]) - step.flow.producers[index].keys() - _attended(op)
                for storage in given if index not in caches else ():
                    turns_of.setdefault(storage, set()).add((number, place))
    return all(
        len(turns) > 1 or step.trace.storages[storage].kind in ("parameter", "buffer")
        for storage, turns in turns_of.items()
    )


def _independent_part(step: Step, loop: Loop, needing: Collection[int]) -> Loop | None:
    """What each turn computes from its own inputs, before it needs the turns before."""
    fed: set[int] = set()
    inside = set(loop.members)
    for index in loop.members:
        reads, producers = step.flow.read_by[index], step.flow.producers[index]
        if index not in needing and any(
            producers[storage] in fed if producers.get(storage) in inside else _is_data(step, storage)
            for storage in reads
        ):
            fed.add(index)
    counts = Counter(key[1:] for key, index in _keyed(step, loop.runs) if index in fed)
    turns = len(loop.turns)
    chosen = {index for key, index in _keyed(step, loop.runs) if index in fed and counts[key[1:]] >= _ORDINARY * turns}
    if not chosen:
        return None
    places = {(step.ops[index].source, step.ops[index].module) for index in chosen}
    places -= {(step.ops[index].source, step.ops[index].module) for index in inside - chosen if index in needing}
    chosen |= {index for index in loop.backward_members if (step.ops[index].source, step.ops[index].module) in places}
    runs, backward = (
        tuple(tuple(tuple(index for index in turn if index in chosen) for turn in run) for run in part)
        for part in (loop.runs, loop.backward)
    )
    return dataclasses.replace(loop, runs=runs, backward=backward)


def _is_data(step: Step, storage: int) -> bool:
    return storage in step.trace.storages and step.trace.storages[storage].kind in ("input", "intermediate")


def _read_tensors(op: Op) -> list[Tensor]:
    """The tensors that an op reads: those of its arguments, but for what it only overwrites."""
    written = op.tensors(*op.mutated) if op.packet in _KEPT_IN_PLACE and not op.arguments.get("accumulate") else ()
    return [tensor for tensor in op.inputs if all(tensor is not item for item in written)]


def _has_all_of(read: Tensor, writer: Op) -> bool:
    """Whether an op wrote all of a tensor."""
    if writer.packet in _KEPT_IN_PLACE[1:]:  # which write some rows
        return False
    return any(
        written.storage == read.storage
        and (
            not writer.mutated
            or (read.shape, read.strides, read.offset) == (written.shape, written.strides, written.offset)
        )
        for written in writer.written
    )


def _are_apart(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((one, other), key=lambda tensor: tensor.offset)
    span = sum((size - 1) * stride for size, stride in zip(first.shape, first.strides, strict=True))
    return first.offset + span < second.offset


def _are_alike(step: Step, loop: Loop) -> bool:
    """Whether nearly all ops are those of ordinary turns, and have the same shapes but for one size."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for key, index in _keyed(step, loop.runs):
        groups.setdefault(key[1:], []).append(index)
    turns, total = len(loop.turns), len(loop.members)
    alike = sum(
        len(group) for group in groups.values() if len(group) >= _ORDINARY * turns and _have_one_shape(step, group)
    )
    return alike >= _MIN_ALIKE * total


def _have_one_shape(step: Step, group: Sequence[int]) -> bool:
    """Whether results differ in one size at most; a convolution needs images of one size."""
    shapes = {tuple(tensor.shape for tensor in step.ops[index].outputs[:1]) for index in group}
    sizes = [shape for shapes_of in shapes for shape in shapes_of]
    if len({len(shape) for shape in sizes}) > 1:
        return False
    differing = [place for place, values in enumerate(zip(*sizes, strict=True)) if len(set(values)) > 1]
    if step.costs[group[0]].family == "convolution":
        return differing in ([], [0])
    return len(differing) <= 1


def _keyed(step: Step, runs: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[tuple[int, str, str, str, int], int]]:
    """Each op with the run, its operator, line and phase, and which of such ops of its turn it is."""
    for number, run in enumerate(runs):
        for turn in run:
            seen: Counter[tuple[str, str, str]] = Counter()
            for index in turn:
                op = step.ops[index]
                kind = (op.name, op.source, op.phase)
                yield (number, *kind, seen[kind]), index
                seen[kind] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A loop as ops on all items."""

    part: _Part
    members: list[int]
    """The ops of both passes."""
    gains: dict[int, float]
    gone: list[int]
    idle: tuple[tuple[IdleCause, float], ...]
    """Waits of the host, stretches of Python, collections of garbage and waits for a data loader in the turns, with the
    seconds of each that go."""

    @classmethod
    def of(cls, step: Step, part: _Part) -> _Batch:
        loop = part.loop
        groups: dict[tuple[object, ...], list[int]] = {}
        for runs in (loop.runs, loop.backward):
            for key, index in _keyed(step, runs):
                groups.setdefault(key, []).append(index)
        gains: dict[int, float] = {}
        gone: list[int] = []
        added, summands = (
            of_leaves | of_turns
            for of_leaves, of_turns in zip(gradient_sums(step), gradients_added(step, loop), strict=True)
        )
        for group in groups.values():
            if added.issuperset(group):  # one backward pass has one gradient
                left_s = 0.0
            else:
                left_s = _at_once_seconds(step, group, are_added=summands.issuperset(group), attends=part.attends)
            for index in group:  # the first ops stay, as long as all of them together would take
                stays_s = min(left_s, step.time(index))
                left_s -= stays_s
                gains[index] = step.time(index) - stays_s
            gone += group[1:]
        members = sorted(index for group in groups.values() for index in group)
        idle = tuple(_idle(step, loop)) if part.is_whole else ()
        return cls(part=part, members=members, gains=gains, gone=gone, idle=idle)

    @property
    def _idle_s(self) -> float:
        return sum(time for _, time in self.idle)

    @property
    def saved_s(self) -> float:
        """The time of ops, and of waiting and Python between them."""
        return sum(self.gains.values()) + self._idle_s

    def is_worth_it(self, step: Step) -> bool:
        """Whether a good share of the time of the loop is saved."""
        waits_s = launch_wait_seconds(step, self.members) + self._idle_s
        saved_s = sum(self.gains.values()) + launch_wait_seconds(step, self.gone) + self._idle_s
        return saved_s > MIN_GAIN * (step.seconds(self.members) + waits_s)

    def waste(self, step: Step) -> Waste:
        """The finding."""
        loop = self.part.loop
        turns = len(loop.turns)
        launched = [index for index in self.members if step.costs[index].family != "view"] or self.members
        took = step.seconds(self.members)
        backward = any(turn for run in loop.backward for turn in run)
        waits = sum(cause.count for cause, _ in self.idle if cause.cause == "synchronization")
        idle: dict[str, float] = {}
        for cause, time in self.idle:
            idle[cause.cause] = idle.get(cause.cause, 0.0) + time
        line = slowest_line(step, loop)
        remaining_s = took - sum(self.gains.values())
        own_weights = has_own_weights(step, loop)
        return Waste(
            title=(
                f"A Python loop runs {len(loop.runs[0])} positions of a sequence one at a time, all known before"
                if self.part.attends
                else f"A Python loop handles {len(loop.runs[0])} items one at a time"
                if self.part.is_whole
                else f"Each of {len(loop.runs[0])} turns of a Python loop computes what needs none of the others"
            )
            + (", and the host waits for each." if waits >= turns else "."),
            op=next((index for index in self.members if step.ops[index].source == line), None),
            source=line,
            gains=self.gains,
            gone=self.gone,
            replaces=True,
            idle=idle,
            causes=[cause for cause, _ in self.idle],
            evidence=f"The loop at {loop.line} takes {turns:,} turns, {len(launched) / turns:.0f} ops each"
            + (" with their backward pass" if backward else "")
            + f": {seconds(took)} in {len(launched):,} ops of {seconds(took / max(1, len(launched)))}"
            + (f", and {waits:,} waits of the host" if waits else "")
            + (f", in {seconds(idle['input'])} of waiting for a data loader" if "input" in idle else "")
            + (
                ". What a turn takes of the turns before are keys and values of attention."
                if self.part.attends
                else ". No turn needs a result of another, but for sums."
                if self.part.is_whole
                else ", which take nothing from the turns before. The rest of a turn does."
            ),
            reasoning=f"One op for all items in place of each op of a turn: {seconds(remaining_s)} in ops, and "
            f"{len(self.gone):,} calls less.",
            remedy=_LOADER_REMEDY
            if "input" in idle
            else _POSITIONS_REMEDY
            if self.part.attends
            else _remedy(step, loop, own_weights=own_weights, is_whole=self.part.is_whole),
        )


def _idle(step: Step, loop: Loop) -> Iterator[tuple[IdleCause, float]]:
    """The idle time in the turns, with the seconds that go with them."""
    members = set(loop.members)
    places = {step.ops[index].place for index in members} - {""}
    callers = {turn.line for index in members for turn in step.ops[index].turns if turn.number != loop.number}
    for cause in step.profile.idle:
        if cause.cause in ("synchronization", "garbage collection"):
            if cause.where in places:
                yield cause, cause.seconds
        elif cause.cause == "python" and not cause.what:
            if cause.where in places and cause.count >= len(loop.runs[0]):
                yield cause, cause.seconds
        elif cause.cause == "input" and cause.where in callers and cause.what != WORKERS_STARTED:
            inside = [
                index for index, op in enumerate(step.ops) if any(turn.line == cause.where for turn in op.turns[:-1])
            ]
            yield cause, cause.seconds * len(members.intersection(inside)) / len(inside)
    if has_own_weights(step, loop):  # an optimizer goes through all parameters in Python
        of_loop = {storage for turn in loop.runs[0] for storage in parameters_of(step, turn)}
        stays = len(of_loop) / len(loop.runs[0])
        everything = sum(storage.kind == "parameter" for storage in step.trace.storages.values())
        updated = {op.place for op in step.ops if op.phase == "optimizer"}
        for cause in step.idle_causes("python"):
            if cause.where in updated and not cause.what:
                yield cause, cause.seconds * (len(of_loop) - stays) / everything


def _is_preferred(batch: _Batch, other: _Batch) -> bool:
    """Of an outer and an inner loop, the inner one if it has most of what the outer one saves."""
    inner, outer = sorted((batch, other), key=lambda item: len(item.members))
    better = (
        inner
        if inner.saved_s + len(inner.gone) * 1e-6 > _MOST_OF_OUTER * (outer.saved_s + len(outer.gone) * 1e-6)
        else outer
    )
    return better is batch


def _at_once_seconds(step: Step, group: Sequence[int], *, are_added: bool = False, attends: bool = False) -> float:
    """The time of one op that does the work of the ops of a group, which differ in their items; with `are_added`, of
    ops whose results are added up; with `attends`, of positions that attend to the same keys."""
    took = step.seconds(group)
    if len(group) < 2 or not took:
        return took
    op, family = step.ops[group[0]], step.costs[group[0]].family
    if family == "creation":
        return took / len(group)
    good_s = sum(step.measured[index].expected_s or 0.0 for index in group)
    slower = min(max(1.0, took / good_s), _MAX_SLOWNESS) if good_s else 1.0
    sizes = [product_sizes(step.ops[index]) if op.packet in FACTORS else None for index in group]
    products = [size for size in sizes if size is not None]
    if len(products) == len(group):
        at_once_s = step.expected(_one_product(step, group, products))
    elif attends and op.packet.startswith(_ATTENTION):
        at_once_s = step.expected(_one_attention(step, group))
    elif family in ("convolution", "attention"):
        known = step.trace.storages
        larger = with_rows(step, op, len(group), lambda tensor: len(tensor.shape) > 1 and tensor.storage in known)
        at_once_s = step.expected(larger)
    else:
        at_once_s = one_op_seconds(step, group, are_added=are_added)
    return took if at_once_s is None else min(took, slower * at_once_s)


def _one_product(step: Step, group: Sequence[int], sizes: Sequence[tuple[int, int, int, int]]) -> Op:
    """The product of all items: more rows or columns if all turns have one factor in common, a longer contraction if
    their results are added up, and else a batch."""
    op = step.ops[group[0]]
    left, right = ({_address(step.ops[index], FACTORS[op.packet][number]) for index in group} for number in (0, 1))
    batch, m, n, k = sizes[0]
    dtype, tf32 = op.tensor(FACTORS[op.packet][0]).dtype, op.tf32_products
    if len(right) == 1:
        m = sum(size[1] for size in sizes)
        if op.packet == "aten.addmm":  # a bias may take a kernel of its own
            rows = dataclasses.replace(op.tensor("mat1"), shape=(m, k), strides=(k, 1))
            result = dataclasses.replace(op.outputs[0], shape=(m, n), strides=(n, 1))
            return dataclasses.replace(op, arguments={**op.arguments, "mat1": rows}, outputs=(result,))
    elif len(left) == 1:
        n = sum(size[2] for size in sizes)
    elif op.phase == "backward" and any(
        step.ops[reader].packet in ADDITIONS for index in group for reader in step.flow.consumers[index]
    ):
        k = sum(size[3] for size in sizes)
    else:
        batch *= len(group)
        m, n, k = (max(size[place] for size in sizes) for place in (1, 2, 3))
    return gemm_op(batch, m, n, k, dtype=dtype, tf32=tf32)


def _one_attention(step: Step, group: Sequence[int]) -> Op:
    """The attention of all positions to the keys of the last one, which has those of all."""
    last = step.ops[group[-1]]
    rows = sum(step.ops[index].tensor("query").shape[-2] for index in group)
    query, out = last.tensor("query"), last.outputs[0]
    larger = [
        dataclasses.replace(tensor, shape=(*tensor.shape[:-2], rows, tensor.shape[-1])) for tensor in (query, out)
    ]
    return dataclasses.replace(
        last, arguments={**last.arguments, "query": larger[0]}, outputs=(larger[1], *last.outputs[1:])
    )


def _address(op: Op, argument: str) -> tuple[int, int]:
    tensor = op.tensor(argument)
    return tensor.storage, tensor.offset


def _remedy(step: Step, loop: Loop, *, own_weights: bool, is_whole: bool) -> str:
    if _alternates(loop):
        return (
            "loss = criterion(model(batch), targets)  # all parts at once: what backward needs of them fits in memory\n"
            "loss.backward()  # gradients are added up part by part only where it does not"
        )
    if not is_whole:
        return "y = f(x)  # once before the loop, with all turns as a dimension of x; in the loop, y[:, t]"
    if own_weights:
        return (
            "layer = torch.nn.Linear(inputs, items * outputs)  # one layer in place of one for each item\n"
            "y = layer(x).unflatten(-1, (items, outputs))  # or torch.bmm with stacked weights, where inputs differ"
        )
    reads = any(is_read(step.ops[index]) for index in loop.members)
    return (
        "y = f(items)  # once, with the items as a dimension of the tensors (torch.stack, unsqueeze), in place of the "
        "loop;\n# items of different lengths padded, with a mask"
        + ("\n# numbers that the loop reads stay tensors: gather, index, torch.where" if reads else "")
        + "\ny = torch.vmap(f)(items)  # the same, of a function as it is"
    )
