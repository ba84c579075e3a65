"""Regions: ops that one kernel could do in forward and another in backward, and what these two would take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearpeak.bound.dependencies import CHAINED
from nearpeak.diagnose.examined import Examined
from nearpeak.work.cost import Access, Family
from nearpeak.work.tensor import Tensor

FUSED: frozenset[Family] = CHAINED | {"reduction"}
"""Families of ops that a compiler puts into one kernel with their neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Ops that a fused form replaces. `backward` is empty where none ran."""

    forward: frozenset[int]
    backward: frozenset[int] = frozenset()

    @property
    def members(self) -> frozenset[int]:
        """All of them."""
        return self.forward | self.backward


def spread(step: Examined, members: Iterable[int], remaining_s: float) -> dict[int, float]:
    """What is saved op by op, where `remaining_s` is left of all: each gives the same share of its time."""
    took = {index: step.measured[index].measured_s for index in members}
    total = sum(took.values())
    share = 1 - remaining_s / total if total > remaining_s else 0.0
    return {index: seconds * share for index, seconds in took.items() if seconds}


def launching(step: Examined, members: Iterable[int]) -> list[int]:
    """Those that do anything: views, and `empty`, do not."""
    return [index for index in sorted(members) if step.costs[index].reads or step.costs[index].writes]


def with_backward(step: Examined, forwards: Sequence[Collection[int]]) -> list[Region]:
    """Forward parts with the ops that ran backward through them.

    These carry the lines and modules of their forward ops. Of one line there may be many, in the reverse order: each
    is a piece that hangs together by its gradients.
    """
    alike: dict[tuple[frozenset[str], str], list[Collection[int]]] = {}
    for forward in sorted(forwards, key=min):
        launched = launching(step, forward)
        lines = frozenset(step.ops[index].source for index in launched) - {""}
        alike.setdefault((lines, step.ops[max(launched)].module), []).append(forward)
    found = []
    for (lines, _), group in alike.items():
        modules = {step.ops[index].module for forward in group for index in launching(step, forward)}
        pieces = _pieces(step, lines, modules) if lines else []
        backward: list[set[int]] = [set() for _ in group]
        for position, piece in enumerate(reversed(pieces)):
            backward[position * len(group) // len(pieces)] |= piece
        for forward, behind in zip(group, backward, strict=True):
            found.append(Region(forward=frozenset(forward), backward=frozenset(behind)))
    return found


def _pieces(step: Examined, lines: frozenset[str], modules: set[str]) -> list[set[int]]:
    candidates = {
        index
        for index, op in enumerate(step.ops)
        if op.phase == "backward"
        and not op.recomputed
        and op.source in lines
        and op.module in modules
        and step.costs[index].family in FUSED
    }
    return connected(step, candidates)


def connected(step: Examined, candidates: Collection[int]) -> list[set[int]]:
    """Ops in pieces, the first first: two hang together where one reads what the other wrote for no one else.

    And where both read what came from the same op of the step.
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
            same_phase = step.ops[producer].phase == step.ops[index].phase
            if producer in inside and set(step.flow.consumers[producer]) <= inside:
                parent[root(index)] = root(producer)
            if same_phase and producer != index:
                other = readers.setdefault((storage, producer), index)
                parent[root(index)] = root(other)
    pieces: dict[int, set[int]] = {}
    for index in sorted(inside):
        pieces.setdefault(root(index), set()).add(index)
    return sorted(pieces.values(), key=min)


def traffic(step: Examined, region: Region) -> tuple[list[tuple[Access, ...]], list[tuple[Access, ...]]]:
    """What a fused form reads and writes, in forward and in backward.

    Nothing that only the region itself reads is written. What the backward part wants of that it finds again in what
    the forward part read.
    """
    members = region.members
    wanted = {
        storage
        for index in members
        for storage in step.flow.written_by[index]
        if storage in step.flow.results or any(reader not in members for reader in step.flow.consumers[index])
    }
    made = {storage for index in region.forward for storage in step.flow.written_by[index]}
    reads, writes = [], []
    for part in (region.forward, region.backward):
        if not part:
            continue
        read, written = step.border(part)
        if part is region.backward:
            lost = [access for access in read if access.storage in made - wanted]
            read = tuple(access for access in read if access not in lost)
            if lost:
                there = {access.storage for access in read}
                read += tuple(access for access in reads[0] if access.storage not in there)
        reads.append(read)
        writes.append(tuple(access for access in written if access.storage in wanted))
    return reads, writes


def remaining_seconds(step: Examined, region: Region, *, kinds: tuple[str, str] = ("pointwise", "pointwise")) -> float:
    """What good kernels take for a region, one in forward and one in backward; like kernels of these kinds."""
    reads, writes = traffic(step, region)
    return sum(
        step.of_work(read, written, kind=kind) for read, written, kind in zip(reads, writes, kinds, strict=False)
    )


def full(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor has as many elements as one of that shape, none of them broadcast."""
    elements = 1
    for size in shape:
        elements *= size
    return tensor.elements == elements and not any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )


def bytes_of(accesses: Iterable[Sequence[Access]]) -> float:
    """Of all of them together."""
    return sum(access.bytes for part in accesses for access in part)


def ops_named(step: Examined, members: Iterable[int]) -> str:
    """Names of ops with how often each is there: "3 mul, pow, mean"."""
    counts: dict[str, int] = {}
    for index in members:
        name = step.ops[index].packet.removeprefix("aten.")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())


def first_of(step: Examined, members: Collection[int], weights: Mapping[int, float] | None = None) -> int:
    """The op that stands for all of them: the one that took longest."""
    return max(sorted(members), key=lambda index: (weights or {}).get(index, step.measured[index].measured_s))
