"""Tensors are computed by the processor in the step, before they are copied to the device or after they were copied
from it, and the device waits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.host_reads import copy_sources, is_copy_to_device, is_copy_to_host
from nearpeak.findings.step import Step
from nearpeak.machines.machine import Achievable
from nearpeak.ops.op import Op, name_without_origin
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import quantity, seconds

_ALL_OF_COPY = 0.999
"""Of the bytes of a copy: if what the ops read is smaller, less is copied when they run on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChain:
    """Ops on tensors in the memory of the host whose result is copied to the device."""

    copy: int
    ops: tuple[int, ...]
    input_bytes: float
    """What they read that exists before them: this would be copied instead."""


def host_chains(step: Step) -> list[HostChain]:
    """The chains of a step, in the order of their copies. Views belong to them, and take no time."""
    chains = []
    taken: set[int] = set()
    for copy, op in enumerate(step.ops):
        if not is_copy_to_device(step, op):
            continue
        wanted = {tensor.storage for tensor in copy_sources(op)}
        inputs: dict[int, float] = {}
        members: list[int] = []
        for index in range(copy - 1, -1, -1):
            before = step.ops[index]
            written = {tensor.storage for tensor in (*before.outputs, *before.written)}
            if before.origin != "host" or not wanted & written:
                continue
            members.append(index)
            wanted |= {tensor.storage for tensor in before.inputs}
        made = {tensor.storage for index in members for tensor in step.ops[index].outputs}
        for index in members:
            for tensor in step.ops[index].inputs:
                if tensor.storage not in made:
                    inputs[tensor.storage] = max(inputs.get(tensor.storage, 0.0), tensor.bytes)
        members = [index for index in members if index not in taken]  # the first copy of a result pays for it
        taken.update(members)
        if members:
            chains.append(HostChain(copy=copy, ops=tuple(reversed(members)), input_bytes=sum(inputs.values())))
    return chains


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultChain:
    """Ops on the host that compute with what was copied from the device, at one line."""

    copies: tuple[int, ...]
    ops: tuple[int, ...]


def result_chains(step: Step, taken: Collection[int]) -> dict[str, ResultChain]:
    """The chains of a step without the ops that are `taken`, by the line of their copies."""
    copies: dict[str, list[int]] = {}
    members: dict[str, list[int]] = {}
    copied_at: dict[int, str] = {}
    """The line of the last copy that a storage depends on."""
    for index, op in enumerate(step.ops):
        written = {tensor.storage for tensor in (*op.outputs, *op.written)}
        if is_copy_to_host(step, op):
            copies.setdefault(op.place, []).append(index)
            copied_at.update(dict.fromkeys(written, op.place))
        elif op.origin == "host":
            lines = [copied_at[tensor.storage] for tensor in op.inputs if tensor.storage in copied_at]
            if lines and index not in taken:
                members.setdefault(lines[-1], []).append(index)
                copied_at.update(dict.fromkeys(written, lines[-1]))
    return {line: ResultChain(copies=tuple(copies[line]), ops=tuple(ops)) for line, ops in members.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnHost:
    """What some ops on the host cost, and what they would take on the device."""

    causes: list[IdleCause]
    idle_s: float
    on_device_s: float
    text: str

    @staticmethod
    def of(step: Step, limits: Achievable, members: Sequence[int], where: str) -> _OnHost:
        """`where`: the line of the copies."""
        ops = [step.ops[index] for index in members]
        places, names = {op.place for op in ops}, {_name(op) for op in ops}
        causes = [idle for idle in step.idle_causes("host ops") if idle.where in places and idle.what in names]
        moved = sum(tensor.bytes for op in ops for tensor in (*op.inputs, *op.outputs))
        made = sorted(places - {where})
        return _OnHost(
            causes=causes,
            idle_s=sum(cause.seconds for cause in causes),
            on_device_s=moved / limits.bandwidth + len(ops) * (limits.launch.enqueue or 0.0),
            text=", ".join(sorted({cause.what for cause in causes})) + (f" at {', '.join(made[:3])}" if made else ""),
        )


@rule("computed-on-host", needs=["storages", "host"])
def computed_on_host(step: Step) -> Iterator[Waste]:
    """Idle time in long ops on the host whose results a copy takes to the device, or that compute with what a copy took
    from it, by the line of the copy."""
    limits = step.machine.achievable
    if step.machine.kind != "gpu" or limits is None:
        return
    taken: set[int] = set()
    by_line: dict[str, list[HostChain]] = {}
    for chain in host_chains(step):
        by_line.setdefault(step.ops[chain.copy].place, []).append(chain)
        taken.update(chain.ops)
    yield from _of_results(step, limits, taken)
    for where, chains in by_line.items():
        on_host = _OnHost.of(step, limits, [index for chain in chains for index in chain.ops], where)
        if on_host.idle_s <= on_host.on_device_s:
            continue
        copied = {chain.copy: sum(item.bytes for item in copy_sources(step.ops[chain.copy])) for chain in chains}
        less = {chain.copy: max(0.0, 1.0 - chain.input_bytes / copied[chain.copy]) for chain in chains}
        took_s = step.seconds(copied)
        yield Waste(
            title="Tensors are computed by the processor in the step, and the device waits for them.",
            op=chains[0].copy,
            gains={copy: share * step.time(copy) for copy, share in less.items() if share > 1.0 - _ALL_OF_COPY},
            idle={"host ops": on_host.idle_s - on_host.on_device_s},
            causes=on_host.causes,
            evidence=f"{on_host.text} ran on the host, where the device was idle for {seconds(on_host.idle_s)}; then "
            f"{quantity(sum(copied.values()), 'B')} were copied to the device in {seconds(took_s)}.",
            reasoning=f"On the device the same ops take {seconds(on_host.on_device_s)}"
            + (
                f", and {quantity(sum(chain.input_bytes for chain in chains), 'B')} are copied, not "
                f"{quantity(sum(copied.values()), 'B')}."
                if any(share > 1.0 - _ALL_OF_COPY for share in less.values())
                else "."
            ),
            remedy=_remedy(chains),
        )


def _of_results(step: Step, limits: Achievable, taken: Collection[int]) -> Iterator[Waste]:
    for where, chain in result_chains(step, taken).items():
        on_host = _OnHost.of(step, limits, chain.ops, where)
        waits = [idle for idle in step.idle_causes("synchronization") if idle.where == where]
        waited_s = sum(cause.seconds for cause in waits)
        if on_host.idle_s <= on_host.on_device_s:
            continue
        copied = {copy: step.time(copy) for copy in chain.copies}
        moved = sum(item.bytes for copy in chain.copies for item in copy_sources(step.ops[copy]))
        yield Waste(
            title="The processor computes with results of the device in the step, and the device waits.",
            op=chain.copies[0],
            gains=copied,
            gone=copied,
            idle={"host ops": on_host.idle_s - on_host.on_device_s} | ({"synchronization": waited_s} if waits else {}),
            causes=[*on_host.causes, *waits],
            evidence=f"{quantity(moved, 'B')} were copied to the host in {seconds(step.seconds(copied))}; then "
            f"{on_host.text} ran there, where the device was idle for {seconds(on_host.idle_s)}"
            + (f", after {seconds(waited_s)} in which it waited for the copy." if waits else "."),
            reasoning=f"On the device the same ops take {seconds(on_host.on_device_s)}, and nothing is copied.",
            remedy="Let the device compute, and copy what is left at the end:\n"
            "    sums = torch.zeros(shape, device='cuda'); sums += result  # not sums += result.cpu()\n"
            "# what the device has no memory for: copy with non_blocking=True into pinned memory, and let another "
            "thread\n# compute while the device goes on",
        )


def _remedy(chains: list[HostChain]) -> str:
    if any(chain.input_bytes for chain in chains):
        return (
            "Copy what these ops read, and let the device compute:\n"
            "    batch = prepare(batch.to('cuda', non_blocking=True))  # not prepare(batch).to('cuda')\n"
            "# or prepare batches in the workers of a data loader"
        )
    return (
        "Make them on the device, once before the steps where they are always the same:\n"
        "    torch.arange(n, device='cuda')  # and what follows from it"
    )


def _name(op: Op) -> str:
    return name_without_origin(op.name)
