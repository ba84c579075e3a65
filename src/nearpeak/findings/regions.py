"""`Region`: ops that one fused kernel in forward and one in backward could replace, and the time of these kernels."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nearpeak.bound.dataflow import CHAINED
from nearpeak.bound.expected import transcendental_seconds
from nearpeak.bound.fusion import does_anything
from nearpeak.findings.step import Step
from nearpeak.ops.cost import Access, Family
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

FUSIBLE: frozenset[Family] = CHAINED | {"reduction"}
"""Families of ops that a compiler fuses with their neighbors."""
_COMPILED_CALL = 12
"""What the call of a function that torch.compile compiled takes of the host, in eager calls of a small op: guards and a
wrapper. On a Xeon it took 39 to 51 us where an op took 3.5 us, for 4 to 10 fused ops."""
_COMPILED_CALL_WITH_BACKWARD = 80
"""The same with its backward: an autograd function of Python's, for both passes. There it took 260 to 340 us."""
_HOST_CALLS_OF_LAUNCH = {False: 2, True: 4}
"""Eager calls of small ops on a CPU that take the host as long as one on a GPU, without and with a backward pass. On an
H200, all of a compiled chain with its backward took 163 us, and one without backward 77 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionSaving:
    """What fusing a region saves."""

    members: list[int]
    """The ops that launch a kernel."""
    measured_s: float
    remaining_s: float
    """The time of the fused kernels."""
    moved_bytes: float
    needed_bytes: float
    """The memory traffic of the fused kernels."""
    gains: dict[int, float]
    gone: list[int]
    kernels: str
    """What replaces the region, as the subject of a sentence."""

    def evidence(self, step: Step, where: str) -> str:
        """The ops, their traffic and time, and the traffic that is needed."""
        return (
            f"{describe_ops(step, self.members)}{where} move {quantity(self.moved_bytes, 'B')} in "
            f"{seconds(self.measured_s)}; fused, {quantity(self.needed_bytes, 'B')} would do."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Ops that fused kernels replace. `backward` is empty without a backward pass."""

    forward: frozenset[int]
    backward: frozenset[int] = frozenset()

    @property
    def members(self) -> frozenset[int]:
        """The ops of both passes."""
        return self.forward | self.backward


def fusion_saving(
    step: Step,
    region: Region,
    *,
    times: float = 1.0,
    kinds: tuple[str, str] = ("pointwise", "pointwise"),
    compiled: bool = False,
) -> FusionSaving:
    """What fusing a region saves. For `times` and `kinds` see `remaining_seconds`.

    With `compiled`, torch.compile makes the kernels, and the host takes its time for a call of them.
    """
    members = ops_that_launch(step, region.members)
    remaining = remaining_seconds(step, region, times=times, kinds=kinds)
    gone = launches_removed(step, members, remaining)
    if compiled:
        gone, left_s = _after_compiled_call(step, region, gone)
        remaining += left_s + _slow_arithmetic_seconds(step, members, times)
    reads, writes = traffic(step, region)
    return FusionSaving(
        members=members,
        measured_s=step.seconds(members),
        remaining_s=remaining,
        moved_bytes=step.bytes(members),
        needed_bytes=sum(access.bytes for part in (*reads, *writes) for access in part),
        gains=proportional_gains(step, members, remaining),
        gone=gone,
        kernels="One kernel in forward and one in backward" if region.backward else "One kernel",
    )


def proportional_gains(step: Step, members: Iterable[int], remaining_s: float) -> dict[int, float]:
    """The saving per op if `remaining_s` remains of all: each op saves the same share of its time."""
    took = {index: step.time(index) for index in members}
    total = sum(took.values())
    share = 1 - remaining_s / total if total > remaining_s else 0.0
    return {index: time * share for index, time in took.items() if time}


def launches_removed(step: Step, members: Iterable[int], remaining_s: float) -> list[int]:
    """The ops whose launch wait is gone if one kernel per phase does the work of all.

    In each phase these are all ops but the first; and the first too, if the remaining kernels run for longer than the
    host takes for an op, so that the host is ahead of them.
    """
    phases: dict[str, list[int]] = {}
    for index in sorted(members):
        phases.setdefault(step.ops[index].phase, []).append(index)
    ordered = [index for ops in phases.values() for index in ops]
    host_s = (step.seconds(ordered) + launch_wait_seconds(step, ordered)) / max(1, len(ordered))
    if remaining_s > host_s * len(phases):
        return ordered
    return [index for ops in phases.values() for index in ops[1:]]


def _after_compiled_call(step: Step, region: Region, gone: Sequence[int]) -> tuple[list[int], float]:
    """The launches that still go if a compiled function is called, and the seconds of its call beyond those that stay.

    On a GPU the host takes as long as for some of the ops. On a CPU the call takes the place of the time between ops.
    """
    launch = step.machine.achievable.launch if step.machine.achievable else None
    calls = (_COMPILED_CALL_WITH_BACKWARD if region.backward else _COMPILED_CALL) * _stretches(step, region)
    if step.machine.kind == "gpu":
        return list(gone)[calls // _HOST_CALLS_OF_LAUNCH[bool(region.backward)] :], 0.0
    call_s = step.pace * calls * (launch.host_call or 0.0 if launch else 0.0)
    left = list(gone)
    while left and call_s > 0.0:
        call_s -= step.measured[left.pop(0)].launch_wait_s
    return left, max(0.0, call_s)


def _stretches(step: Step, region: Region) -> int:
    """Into how many pieces ops that are not fused, such as products, divide the forward ops: each is a call."""
    ordered = sorted(region.forward)
    return 1 + sum(
        any(
            does_anything(step.costs[between]) and step.costs[between].family not in FUSIBLE for between in range(*pair)
        )
        for pair in pairwise(ordered)
    )


def _slow_arithmetic_seconds(step: Step, members: Iterable[int], times: float) -> float:
    """On a CPU, what ops take beyond a kernel that only moves their bytes: fused, they compute as much.

    Random numbers are all arithmetic. On a GPU, arithmetic hides behind memory.
    """
    if step.machine.kind != "cpu":
        return 0.0
    beyond_s = 0.0
    for index in members:
        moves_s = 0.0 if step.costs[index].family == "random" else step.measured[index].expected_s
        if moves_s is not None and not transcendental_seconds(step.ops[index], step.machine):
            beyond_s += max(0.0, step.time(index) - times * step.pace * moves_s)
    return beyond_s


def launch_wait_seconds(step: Step, members: Iterable[int]) -> float:
    """The idle time that the launches of ops cause."""
    return sum(step.measured[index].launch_wait_s for index in members)


def ops_that_launch(step: Step, members: Iterable[int]) -> list[int]:
    """The ops that launch a kernel: all but views and `empty`."""
    return [index for index in sorted(members) if step.costs[index].reads or step.costs[index].writes]


def with_backward(step: Step, forwards: Sequence[Collection[int]]) -> list[Region]:
    """The forward parts with the ops of the backward pass through them.

    Backward ops carry the lines and modules of their forward ops. A piece of the backward pass that is connected by its
    gradients belongs to the part with most of its lines; of several parts with the same lines, the last runs backward
    first.
    """
    groups: dict[tuple[frozenset[str], frozenset[str]], list[Collection[int]]] = {}
    """Parts by the lines and modules of their ops."""
    for forward in sorted(forwards, key=min):
        launched = [step.ops[index] for index in ops_that_launch(step, forward)]
        lines = frozenset(op.source for op in (*launched, *_views_read(step, forward))) - {""}
        groups.setdefault((lines, frozenset(op.module for op in launched)), []).append(forward)
    pieces: dict[tuple[frozenset[str], frozenset[str]], list[set[int]]] = {}
    for piece in _backward_pieces(step, {line for lines, _ in groups for line in lines}):
        modules = {step.ops[index].module for index in piece}
        near = [key for key in groups if modules <= key[1]] or [key for key in groups if modules & key[1]]
        if near:
            shared = [sum(step.ops[index].source in lines for index in piece) for lines, _ in near]
            pieces.setdefault(near[shared.index(max(shared))], []).append(piece)
    regions = []
    for key, parts in groups.items():
        backwards: list[set[int]] = [set() for _ in parts]
        own = pieces.get(key, [])
        for position, piece in enumerate(reversed(own)):
            backwards[position * len(parts) // len(own)] |= piece
        for forward, backward in zip(parts, backwards, strict=True):
            regions.append(Region(forward=frozenset(forward), backward=frozenset(backward)))
    return regions


def _views_read(step: Step, forward: Collection[int]) -> list[Op]:
    """Views of what the ops read, among them and right before them: in backward they are copies."""
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
    """The connected pieces of some ops, in order: two ops are connected if one reads what the other wrote for these ops
    alone.

    With `siblings`, also if both read the output of the same op of their phase.
    """
    inside = set(candidates)
    parent = {index: index for index in sorted(inside)}
    flow, ops = step.flow, step.ops

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    @functools.cache  # thousands of ops may read what one wrote
    def is_read_inside_only(producer: int) -> bool:
        phase = ops[producer].phase
        return all(reader in inside or ops[reader].phase != phase for reader in flow.consumers[producer])

    readers: dict[tuple[int, int], int] = {}
    for index in sorted(inside):
        phase = ops[index].phase
        for storage, producer in flow.producers[index].items():
            if ops[producer].phase != phase or producer == index:
                continue
            if producer in inside and is_read_inside_only(producer):
                parent[root(index)] = root(producer)
            elif siblings:
                sibling = readers.setdefault((storage, producer), index)
                parent[root(index)] = root(sibling)
    pieces: dict[int, set[int]] = {}
    for index in sorted(inside):
        pieces.setdefault(root(index), set()).add(index)
    return sorted(pieces.values(), key=min)


def traffic(step: Step, region: Region) -> tuple[list[tuple[Access, ...]], list[tuple[Access, ...]]]:
    """The reads and writes of the fused kernels, in forward and in backward.

    What only the region itself reads is not written. The backward kernel recomputes it from the inputs of the forward
    kernel.
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
    forward_writes = {storage for index in region.forward for storage in step.flow.written_by[index]}
    reads: list[tuple[Access, ...]] = []
    writes: list[tuple[Access, ...]] = []
    for part in (region.forward, region.backward):
        if not part:
            continue
        read, written = step.border(part, keep=wanted)
        if part is region.backward:
            lost = [access for access in read if access.storage in forward_writes - wanted]
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
    """The access with all parts of the storage that the ops read: the halves of a tensor are two parts."""
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
    """The time of the fused kernels of a region, one in forward and one in backward, of these kinds.

    They take `times` as long as good kernels of their kinds, for what `measured_over_expected` says about this machine,
    and no less than their bounds.
    """
    reads, writes = traffic(step, region)
    parts = [part for part in (region.forward, region.backward) if part]
    return sum(
        max(
            times * step.expected_for_work(read, written, kind=kind),
            step.least(read, written),
            step.pace * sum(transcendental_seconds(step.ops[index], step.machine) for index in part),
        )
        for part, read, written, kind in zip(parts, reads, writes, kinds, strict=False)
    )


def reduces_last_dim(op: Op) -> bool:
    """Whether a reduction is over the last dimension only."""
    dim = op.arguments.get("dim")
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and dim in (-1, len(op.inputs[0].shape) - 1)


def measured_over_expected(step: Step, members: Iterable[int]) -> float:
    """The measured over the expected time of ops, at the pace of the step: below 1 if they are better than expected.

    Ops whose tensors have different layouts, by strides or broadcasting, do not count: their expected slowness does not
    apply to a fused kernel. Nor do those with transcendental functions, whose time is not that of memory.
    """
    known = [
        index
        for index in members
        if step.measured[index].expected_s
        and _has_one_layout(step, index)
        and not transcendental_seconds(step.ops[index], step.machine)
    ]
    expected = sum(step.measured[index].expected_s or 0.0 for index in known)
    took = step.seconds(known)
    return took / (step.pace * expected) if expected and took else 1.0


def _has_one_layout(step: Step, index: int) -> bool:
    """Whether all tensors of a pointwise op have the same strides; True for other families."""
    if step.costs[index].family not in ("pointwise", "movement"):
        return True
    op = step.ops[index]
    tensors = [tensor for tensor in (*op.inputs, *op.outputs) if tensor.elements > 1]
    strides = {
        tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1)
        for tensor in tensors
    }
    return len(strides) <= 1


def describe_ops(step: Step, members: Iterable[int]) -> str:
    """The names of ops with their counts: "3 mul, pow, mean"."""
    counts: dict[str, int] = {}
    for index in members:
        name = step.ops[index].packet.removeprefix("aten.")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())


def slowest_op(step: Step, members: Collection[int]) -> int:
    """The op with the longest time."""
    return max(sorted(members), key=step.time)
