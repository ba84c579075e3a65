"""Regions: ops that one kernel could do in forward and another in backward, and what these two would take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nearpeak.bound.dataflow import CHAINED
from nearpeak.findings.step import Step
from nearpeak.ops.cost import Access, Family
from nearpeak.ops.op import Op

FUSIBLE: frozenset[Family] = CHAINED | {"reduction"}
"""Families of ops that a compiler puts into one kernel with their neighbors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Ops that a fused form replaces. `backward` is empty where none ran."""

    forward: frozenset[int]
    backward: frozenset[int] = frozenset()

    @property
    def members(self) -> frozenset[int]:
        """All of them."""
        return self.forward | self.backward


def proportional_gains(step: Step, members: Iterable[int], remaining_s: float) -> dict[int, float]:
    """What is saved op by op, where `remaining_s` is left of all: each gives the same share of its time."""
    took = {index: step.measured[index].measured_s for index in members}
    total = sum(took.values())
    share = 1 - remaining_s / total if total > remaining_s else 0.0
    return {index: seconds * share for index, seconds in took.items() if seconds}


def launches_removed(step: Step, members: Iterable[int], remaining_s: float) -> list[int]:
    """Those whose launches nobody waits for any more where one kernel does the work of all, one for each phase.

    Of each phase it is all but the first; and the first too, where the kernels that remain run for longer than the host
    takes for an op: it is then ahead of them.
    """
    phases: dict[str, list[int]] = {}
    for index in sorted(members):
        phases.setdefault(step.ops[index].phase, []).append(index)
    every = [index for some in phases.values() for index in some]
    host_s = (step.seconds(every) + launch_wait_seconds(step, every)) / max(1, len(every))
    if remaining_s > host_s * len(phases):
        return every
    return [index for some in phases.values() for index in some[1:]]


def launch_wait_seconds(step: Step, members: Iterable[int]) -> float:
    """What the device waited for the launches of ops."""
    return sum(step.measured[index].launch_wait_s for index in members)


def ops_that_launch(step: Step, members: Iterable[int]) -> list[int]:
    """Those that do anything: views, and `empty`, do not."""
    return [index for index in sorted(members) if step.costs[index].reads or step.costs[index].writes]


def with_backward(step: Step, forwards: Sequence[Collection[int]]) -> list[Region]:
    """Forward parts with the ops that ran backward through them.

    These carry the lines and modules of their forward ops. A piece of backward that hangs together by its gradients
    belongs to the part with most of its lines; where several have the same lines, the last ran backward first.
    """
    alike: dict[tuple[frozenset[str], frozenset[str]], list[Collection[int]]] = {}
    for forward in sorted(forwards, key=min):
        launched = [step.ops[index] for index in ops_that_launch(step, forward)]
        lines = frozenset(op.source for op in (*launched, *_views_read(step, forward))) - {""}
        alike.setdefault((lines, frozenset(op.module for op in launched)), []).append(forward)
    pieces: dict[tuple[frozenset[str], frozenset[str]], list[set[int]]] = {}
    for piece in _backward_pieces(step, {line for lines, _ in alike for line in lines}):
        modules = {step.ops[index].module for index in piece}
        near = [kind for kind in alike if modules <= kind[1]] or [kind for kind in alike if modules & kind[1]]
        if near:
            shared = [sum(step.ops[index].source in lines for index in piece) for lines, _ in near]
            pieces.setdefault(near[shared.index(max(shared))], []).append(piece)
    found = []
    for kind, group in alike.items():
        backward: list[set[int]] = [set() for _ in group]
        own = pieces.get(kind, [])
        for position, piece in enumerate(reversed(own)):
            backward[position * len(group) // len(own)] |= piece
        for forward, behind in zip(group, backward, strict=True):
            found.append(Region(forward=frozenset(forward), backward=frozenset(behind)))
    return found


def _views_read(step: Step, forward: Collection[int]) -> list[Op]:
    """Views of what the ops read, among them and right before them: going backward they are copies."""
    touched = {storage for index in forward for storage in step.flow.read_by[index]}
    start = min(forward)
    while start and step.costs[start - 1].family == "view":
        start -= 1
    return [
        step.ops[index]
        for index in range(start, max(forward))
        if step.costs[index].family == "view" and any(tensor.storage in touched for tensor in step.ops[index].outputs)
    ]


def _backward_pieces(step: Step, lines: Collection[str]) -> list[set[int]]:
    candidates = {
        index
        for index, op in enumerate(step.ops)
        if op.phase == "backward" and not op.recomputed and op.source in lines and step.costs[index].family in FUSIBLE
    }
    return connected_pieces(step, candidates)


def connected_pieces(step: Step, candidates: Collection[int], *, siblings: bool = True) -> list[set[int]]:
    """Ops in pieces, the first first: two hang together where one reads what the other wrote for these ops alone.

    With `siblings`, also where both read what came from the same op of their phase.
    """
    inside = set(candidates)
    parent = {index: index for index in sorted(inside)}

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    readers: dict[tuple[int, int], int] = {}
    for index in sorted(inside):
        for storage, producer in step.flow.producers[index].items():
            phase = step.ops[index].phase
            if step.ops[producer].phase != phase or producer == index:
                continue
            readers_now = {reader for reader in step.flow.consumers[producer] if step.ops[reader].phase == phase}
            if producer in inside and readers_now <= inside:
                parent[root(index)] = root(producer)
            elif siblings:
                other = readers.setdefault((storage, producer), index)
                parent[root(index)] = root(other)
    pieces: dict[int, set[int]] = {}
    for index in sorted(inside):
        pieces.setdefault(root(index), set()).add(index)
    return sorted(pieces.values(), key=min)


def traffic(step: Step, region: Region) -> tuple[list[tuple[Access, ...]], list[tuple[Access, ...]]]:
    """What a fused form reads and writes, in forward and in backward.

    Nothing that only the region itself reads is written. What the backward part wants of that it finds again in what
    the forward part read.
    """
    members = region.members
    wanted = {
        storage
        for index in members
        for storage in step.flow.written_by[index]
        if storage in step.flow.results
        or not step.flow.consumers[index]
        or any(reader not in members for reader in step.flow.consumers[index])
    }
    made = {storage for index in region.forward for storage in step.flow.written_by[index]}
    reads: list[tuple[Access, ...]] = []
    writes: list[tuple[Access, ...]] = []
    for part in (region.forward, region.backward):
        if not part:
            continue
        read, written = step.border(part, keep=wanted)
        if part is region.backward:
            lost = [access for access in read if access.storage in made - wanted]
            read = tuple(access for access in read if access not in lost)
            if lost:
                both = {access.storage: access.bytes for access in read}
                for access in reads[0]:
                    both[access.storage] = max(both.get(access.storage, 0.0), access.bytes)
                read = tuple(Access(storage=storage, bytes=size) for storage, size in both.items())
        reads.append(tuple(_whole_access(step, part, access) for access in read))
        writes.append(tuple(access for access in written if access.storage in wanted))
    return reads, writes


def _whole_access(step: Step, part: Collection[int], access: Access) -> Access:
    """With all parts of a storage that ops read: the halves of a tensor are two."""
    parts: dict[int, float] = {}
    for index in part:
        for tensor in step.ops[index].inputs:
            if tensor.storage == access.storage:
                parts[tensor.offset] = max(parts.get(tensor.offset, 0.0), tensor.bytes)
    known = step.trace.storages.get(access.storage)
    size = min(sum(parts.values()), known.bytes if known is not None else access.bytes)
    return Access(storage=access.storage, bytes=max(size, access.bytes))


def remaining_seconds(
    step: Step, region: Region, *, times: float = 1.0, kinds: tuple[str, str] = ("pointwise", "pointwise")
) -> float:
    """What is left of a region: one kernel in forward and one in backward, like good kernels of these kinds.

    They take so many times as long as is expected of such kernels, for what `pace` says of this machine; but no less
    than it can do.
    """
    reads, writes = traffic(step, region)
    return sum(
        max(times * step.expected_for_work(read, written, kind=kind), step.least(read, written))
        for read, written, kind in zip(reads, writes, kinds, strict=False)
    )


def reduces_last_dim(op: Op) -> bool:
    """Whether a reduction is over the last dimension alone."""
    dimensions = op.arguments.get("dim")
    given = op.inputs[0].shape
    one = dimensions[0] if isinstance(dimensions, tuple) and len(dimensions) == 1 else dimensions
    return isinstance(one, int) and one in (-1, len(given) - 1)


def measured_over_expected(step: Step, members: Iterable[int]) -> float:
    """What ops took over what good kernels take for them: below 1 where this machine is better than was thought.

    Ops that go through their tensors in several orders, by strides or broadcast, do not count: how slow these are
    expected to be says nothing about a kernel that does not have to be.
    """
    known = [index for index in members if step.measured[index].expected_s and _has_one_layout(step, index)]
    expected = sum(step.measured[index].expected_s or 0.0 for index in known)
    took = step.seconds(known)
    return took / expected if expected and took else 1.0


def _has_one_layout(step: Step, index: int) -> bool:
    """Whether all tensors of an op have the same strides; for families of which nothing else is known, True."""
    if step.costs[index].family not in ("pointwise", "movement"):
        return True
    op = step.ops[index]
    tensors = [tensor for tensor in (*op.inputs, *op.outputs) if tensor.elements > 1]
    strides = {
        tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1)
        for tensor in tensors
    }
    return len(strides) <= 1


def total_bytes(accesses: Iterable[Sequence[Access]]) -> float:
    """Of all of them together."""
    return sum(access.bytes for part in accesses for access in part)


def describe_ops(step: Step, members: Iterable[int]) -> str:
    """Names of ops with how often each is there: "3 mul, pow, mean"."""
    counts: dict[str, int] = {}
    for index in members:
        name = step.ops[index].packet.removeprefix("aten.")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())


def slowest_op(step: Step, members: Collection[int]) -> int:
    """The op that took longest, the first of them."""
    return max(sorted(members), key=lambda index: step.measured[index].measured_s)
