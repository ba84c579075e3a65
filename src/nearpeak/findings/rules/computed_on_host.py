"""Tensors are computed by the processor in the step and then copied to the device, which waits for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.host_reads import copy_sources, is_copy_to_device
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op, name_without_origin
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


@rule("computed-on-host", needs=["storages", "host"])
def computed_on_host(step: Step) -> Iterator[Waste]:
    """Idle time in long ops on the host whose results a copy takes to the device, by the line of the copy."""
    limits = step.machine.achievable
    if step.machine.kind != "gpu" or limits is None:
        return
    by_line: dict[str, list[HostChain]] = {}
    for chain in host_chains(step):
        by_line.setdefault(step.ops[chain.copy].place, []).append(chain)
    for where, chains in by_line.items():
        members = [index for chain in chains for index in chain.ops]
        places = {step.ops[index].place for index in members}
        names = {_name(step.ops[index]) for index in members}
        causes = [idle for idle in step.idle_causes("host ops") if idle.where in places and idle.what in names]
        idle_s = sum(cause.seconds for cause in causes)
        moved = sum(tensor.bytes for index in members for tensor in (*step.ops[index].inputs, *step.ops[index].outputs))
        on_device_s = moved / limits.bandwidth + len(members) * (limits.launch.enqueue or 0.0)
        if idle_s <= on_device_s:
            continue
        copied = {chain.copy: sum(item.bytes for item in copy_sources(step.ops[chain.copy])) for chain in chains}
        less = {chain.copy: max(0.0, 1.0 - chain.input_bytes / copied[chain.copy]) for chain in chains}
        took_s = step.seconds(copied)
        made = sorted(places - {where})
        yield Waste(
            title="Tensors are computed by the processor in the step, and the device waits for them.",
            op=chains[0].copy,
            gains={copy: share * step.time(copy) for copy, share in less.items() if share > 1.0 - _ALL_OF_COPY},
            idle={"host ops": idle_s - on_device_s},
            causes=causes,
            evidence=f"{', '.join(sorted({cause.what for cause in causes}))}"
            + (f" at {', '.join(made[:3])}" if made else "")
            + f" ran on the host, where the device was idle for {seconds(idle_s)}; then "
            f"{quantity(sum(copied.values()), 'B')} were copied to the device in {seconds(took_s)}.",
            reasoning=f"On the device the same ops take {seconds(on_device_s)}"
            + (
                f", and {quantity(sum(chain.input_bytes for chain in chains), 'B')} are copied, not "
                f"{quantity(sum(copied.values()), 'B')}."
                if any(share > 1.0 - _ALL_OF_COPY for share in less.values())
                else "."
            ),
            remedy=_remedy(chains),
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
